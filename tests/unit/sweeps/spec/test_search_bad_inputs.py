# ruff: noqa: E501, because a spec stands on one line
"""Every invalid search setting is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

import pytest

from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

OPT = """\
space:
  train.optimizer.name: {choice: [sgd, adamw]}
  train.optimizer.lr: {loguniform: [1e-4, 0.1]}
"""

CASES = [
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: sgd}\n",
        id="condition that is none",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {}}\n",
        id="empty condition",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: [[sgd]]}}\n",
        id="condition on a list of lists",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: []}}\n",
        id="condition without values",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.nam: sgd}}\n",
        id="condition on an unknown key",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {seed: 3}}\n",
        id="condition on what is not searched",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.lr: 0.1}}\n",
        id="condition on a range",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: [sgd, adam]}}\n",
        id="condition on what is no option",
    ),
    pytest.param(
        OPT + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: adam}}\n",
        id="condition on one that is no option",
    ),
    pytest.param(
        "space:\n  task.a: {choice: [x, y], when: {task.a: x}}\n",
        id="condition on itself",
    ),
    pytest.param(
        "space:\n  task.a: {choice: [x, y], when: {task.b: x}}\n  task.b: {choice: [x, y], when: {task.a: x}}\n",
        id="conditions in a circle",
    ),
    pytest.param(
        OPT
        + "  train.optimizer.momentum: {uniform: [0.5, 1.5], when: {train.optimizer.name: sgd}}\n",
        id="a value that is wrong under its condition",
    ),
    pytest.param(
        OPT + "  train.clip.value: {when: {train.optimizer.name: sgd}}\n",
        id="a condition alone",
    ),
    pytest.param(
        OPT + "search: {constraints: [3]}\n",
        id="a constraint that is no text",
    ),
    pytest.param(
        OPT + "search: {constraints: task.a < 3}\n",
        id="constraints that are no list",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.lr <']}\n",
        id="a constraint that Python cannot read",
    ),
    pytest.param(
        OPT + "search: {constraints: [train.optimizer.lr + 1]}\n",
        id="a constraint without a comparison",
    ),
    pytest.param(
        OPT + "search: {constraints: ['__import__(1) < train.optimizer.lr']}\n",
        id="a constraint that calls",
    ),
    pytest.param(
        OPT + "search: {constraints: ['9 ** 9 < train.optimizer.lr']}\n",
        id="a constraint with a power",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.name == \"sgd\"']}\n",
        id="a constraint with text",
    ),
    pytest.param(
        OPT + "search: {constraints: ['1 < 2']}\n",
        id="a constraint between no keys",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.lr in 3']}\n",
        id="a constraint by 'in'",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.ler < 1']}\n",
        id="a constraint on an unknown key",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.name < 1']}\n",
        id="a constraint on names",
    ),
    pytest.param(
        OPT + "search: {constraints: ['train.optimizer.lr > 1']}\n",
        id="constraints that nothing satisfies",
    ),
    pytest.param(
        OPT + "search: {sampler: tpee}\n",
        id="a sampler that is none",
    ),
    pytest.param(
        OPT + "search: {sampler: automatic}\nearly_stopping: automatic\n",
        id="auto misspelt",
    ),
    pytest.param(
        OPT + "budget: {epochs: 3}\nearly_stopping: {scheduler: auto, grace_epochs: 3}\n",
        id="auto with a first rung beyond the budget",
    ),
    pytest.param(
        OPT + "search: {sampler: 3}\n",
        id="a sampler of another kind",
    ),
    pytest.param(
        OPT + "search: {sampler: 'optuna.samplers:'}\n",
        id="a sampler's class misspelt",
    ),
    pytest.param(
        OPT + "search: {sampler: grid}\n",
        id="a grid of ranges",
    ),
    pytest.param(
        "space:\n  train.batch_size: {logint: [1, 8]}\nsearch: {sampler: grid}\n",
        id="a grid of weights",
    ),
    pytest.param(
        OPT + "search: {try_first: {train.optimizer.lr: 0.1}}\n",
        id="points that are no list",
    ),
    pytest.param(
        OPT + "search: {try_first: [3, {}]}\n",
        id="a point that is none",
    ),
    pytest.param(
        OPT + "search: {try_first: [{train.optimizer.lr: [1]}]}\n",
        id="a point with a list",
    ),
    pytest.param(
        OPT + "search: {try_first: [{train.optimizer.ler: 1}]}\n",
        id="a point with an unknown key",
    ),
    pytest.param(
        OPT
        + "search: {try_first: [{train.optimizer.lr: 1}, {train.optimizer.lr: fast}, {train.optimizer.name: adam}]}\n",
        id="a point outside",
    ),
    pytest.param(
        OPT
        + "  train.optimizer.momentum: {uniform: [0.5, 0.9], when: {train.optimizer.name: sgd}}\nsearch: {try_first: [{train.optimizer.momentum: 0.7}]}\n",
        id="a point with what does not exist",
    ),
    pytest.param(
        OPT
        + "search: {constraints: ['train.optimizer.lr < 0.01'], try_first: [{train.optimizer.lr: 0.1}]}\n",
        id="a point that violates a constraint",
    ),
    pytest.param(
        "space:\n  train.clip.value: {uniform: [1, 2]}\nsearch: {try_first: ["
        + ", ".join(["{train.clip.value: 1}"] * 25)
        + "]}\n",
        id="more points than trials",
    ),
    pytest.param(
        OPT + "search: {warm_start: 3}\n",
        id="warm start of nothing",
    ),
    pytest.param(
        OPT + "search: {warm_start: ../x}\n",
        id="warm start of a path",
    ),
    pytest.param(
        OPT + "search: {warm_start: [a, a]}\n",
        id="warm start twice",
    ),
    pytest.param(
        OPT + "search: {warm_start: digits}\n",
        id="warm start of itself",
    ),
    pytest.param(
        OPT + "search: {warm_start: a, sampler: random}\n",
        id="warm start for chance",
    ),
    pytest.param(
        "space:\n  train.optimizer.lr: {choice: [0.1, 0.2], prior: 0.1}\nsearch: {sampler: grid}\n",
        id="prior in a grid",
    ),
    pytest.param(
        "space:\n  train.optimizer.lr: {choice: [0.1, 0.2]}\nsearch: {sampler: grid, priors: defaults}\n",
        id="defaults as priors in a grid",
    ),
    pytest.param(
        "space:\n  train.clip.value: {uniform: [1, 2]}\nsearch: {priors: defaults}\n",
        id="defaults as priors of nothing",
    ),
    pytest.param(
        "space:\n  train.optimizer.lr: {uniform: [1, 2]}\nsearch: {priors: some}\n",
        id="priors that are none",
    ),
]


@pytest.mark.parametrize("text", CASES)
def test_invalid_search_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(HEAD + text))
