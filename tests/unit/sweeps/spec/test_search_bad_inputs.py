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

CASES = {
    "condition that is none": OPT + "  train.clip.value: {uniform: [1, 2], when: sgd}\n",
    "empty condition": OPT + "  train.clip.value: {uniform: [1, 2], when: {}}\n",
    "condition on a list of lists": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: [[sgd]]}}\n",
    "condition without values": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: []}}\n",
    "condition on an unknown key": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.nam: sgd}}\n",
    "condition on what is not searched": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {seed: 3}}\n",
    "condition on a range": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.lr: 0.1}}\n",
    "condition on what is no option": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: [sgd, adam]}}\n",
    "condition on one that is no option": OPT
    + "  train.clip.value: {uniform: [1, 2], when: {train.optimizer.name: adam}}\n",
    "condition on itself": "space:\n  task.a: {choice: [x, y], when: {task.a: x}}\n",
    "conditions in a circle": "space:\n  task.a: {choice: [x, y], when: {task.b: x}}\n  task.b: {choice: [x, y], when: {task.a: x}}\n",
    "a value that is wrong under its condition": OPT
    + "  train.optimizer.momentum: {uniform: [0.5, 1.5], when: {train.optimizer.name: sgd}}\n",
    "a condition alone": OPT + "  train.clip.value: {when: {train.optimizer.name: sgd}}\n",
    "a constraint that is no text": OPT + "search: {constraints: [3]}\n",
    "constraints that are no list": OPT + "search: {constraints: task.a < 3}\n",
    "outcome constraints below search": OPT + "search: {constraints: {val/ms: {max: 5}}}\n",
    "comparisons as outcome constraints": OPT + "constraints: [a < b]\n",
    "outcome constraints that are no mapping": OPT + "constraints: 5\n",
    "an outcome constraint without a limit": OPT + "constraints: {val/ms: {}}\n",
    "an outcome constraint that is a number": OPT + "constraints: {val/ms: 5}\n",
    "an outcome constraint with another key": OPT + "constraints: {val/ms: {most: 5}}\n",
    "an outcome constraint on no number": OPT + "constraints: {val/ms: {max: .inf, min: low}}\n",
    "an outcome constraint that no value satisfies": OPT
    + "constraints: {val/ms: {min: 5, max: 3}}\n",
    "an outcome constraint on test data": OPT + "constraints: {test/ms: {max: 5}}\n",
    "outcome constraints beside a warm start": OPT
    + "search: {warm_start: before}\nconstraints: {val/ms: {max: 5}}\n",
    "a constraint that Python cannot read": OPT
    + "search: {constraints: ['train.optimizer.lr <']}\n",
    "a constraint without a comparison": OPT + "search: {constraints: [train.optimizer.lr + 1]}\n",
    "a constraint that calls": OPT
    + "search: {constraints: ['__import__(1) < train.optimizer.lr']}\n",
    "a constraint with a power": OPT + "search: {constraints: ['9 ** 9 < train.optimizer.lr']}\n",
    "a constraint with text": OPT + "search: {constraints: ['train.optimizer.name == \"sgd\"']}\n",
    "a constraint between no keys": OPT + "search: {constraints: ['1 < 2']}\n",
    "a constraint by 'in'": OPT + "search: {constraints: ['train.optimizer.lr in 3']}\n",
    "a constraint on an unknown key": OPT + "search: {constraints: ['train.optimizer.ler < 1']}\n",
    "a constraint on names": OPT + "search: {constraints: ['train.optimizer.name < 1']}\n",
    "constraints that nothing satisfies": OPT
    + "search: {constraints: ['train.optimizer.lr > 1']}\n",
    "a sampler that is none": OPT + "search: {sampler: tpee}\n",
    "auto misspelt": OPT + "search: {sampler: automatic}\nearly_stopping: automatic\n",
    "auto with a first rung beyond the budget": OPT
    + "budget: {epochs: 3}\nearly_stopping: {scheduler: auto, grace_epochs: 3}\n",
    "a sampler of another kind": OPT + "search: {sampler: 3}\n",
    "a sampler's class misspelt": OPT + "search: {sampler: 'optuna.samplers:'}\n",
    "a grid of ranges": OPT + "search: {sampler: grid}\n",
    "a grid of weights": "space:\n  train.batch_size: {logint: [1, 8]}\nsearch: {sampler: grid}\n",
    "points that are no list": OPT + "search: {try_first: {train.optimizer.lr: 0.1}}\n",
    "a point that is none": OPT + "search: {try_first: [3, {}]}\n",
    "a point with a list": OPT + "search: {try_first: [{train.optimizer.lr: [1]}]}\n",
    "a point with an unknown key": OPT + "search: {try_first: [{train.optimizer.ler: 1}]}\n",
    "a point outside": OPT
    + "search: {try_first: [{train.optimizer.lr: 1}, {train.optimizer.lr: fast}, {train.optimizer.name: adam}]}\n",
    "a point with what does not exist": OPT
    + "  train.optimizer.momentum: {uniform: [0.5, 0.9], when: {train.optimizer.name: sgd}}\nsearch: {try_first: [{train.optimizer.momentum: 0.7}]}\n",
    "a point that violates a constraint": OPT
    + "search: {constraints: ['train.optimizer.lr < 0.01'], try_first: [{train.optimizer.lr: 0.1}]}\n",
    "more points than trials": "space:\n  train.clip.value: {uniform: [1, 2]}\nsearch: {try_first: ["
    + ", ".join(["{train.clip.value: 1}"] * 25)
    + "]}\n",
    "warm start of nothing": OPT + "search: {warm_start: 3}\n",
    "warm start of a path": OPT + "search: {warm_start: ../x}\n",
    "warm start twice": OPT + "search: {warm_start: [a, a]}\n",
    "warm start of itself": OPT + "search: {warm_start: digits}\n",
    "warm start for chance": OPT + "search: {warm_start: a, sampler: random}\n",
    "prior in a grid": "space:\n  train.optimizer.lr: {choice: [0.1, 0.2], prior: 0.1}\nsearch: {sampler: grid}\n",
    "defaults as priors in a grid": "space:\n  train.optimizer.lr: {choice: [0.1, 0.2]}\nsearch: {sampler: grid, priors: defaults}\n",
    "defaults as priors of nothing": "space:\n  train.clip.value: {uniform: [1, 2]}\nsearch: {priors: defaults}\n",
    "priors that are none": "space:\n  train.optimizer.lr: {uniform: [1, 2]}\nsearch: {priors: some}\n",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_invalid_search_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(HEAD + text))
