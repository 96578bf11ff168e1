# ruff: noqa: E501, because a spec stands on one line
"""Every invalid search space is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

import pytest

from sweeps.spec.spec import parse_spec
from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

CASES = [
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [0, 1]}\n",
        id="16 log from zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.batch_size: {logint: [0, 8]}\n",
        id="16 logint from zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.3, 0.1]}\n",
        id="17 low above high",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.3, 0.3]}\n",
        id="18 low equals high",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [.nan, 1]}\n",
        id="19 NaN bound",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, .inf]}\n",
        id="20 infinite bound",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [0.1, 1, 0.1]}\n",
        id="21 log with step",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1, 0.1]}\n",
        id="21 uniform with step",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0.1, 0.35, 0.1]}\n",
        id="21 steps that do not fit",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0.1, 0.3, 0]}\n",
        id="21 step of zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0, 1, 1.0e-30]}\n",
        id="21 more steps than are counted",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: []}\n",
        id="22 empty choices",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [1, 1.0]}\n",
        id="22 equal choices",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [[1]]}\n",
        id="22 nested choices",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [.inf]}\n",
        id="22 infinite choice",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {normal: [0, 1]}\n",
        id="23 unknown distribution",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: 0.1\n",
        id="23 constant",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1], int: [1, 2]}\n",
        id="23 two distributions",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: 3}\n",
        id="23 bounds not a list",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [a, 1]}\n",
        id="23 text bound",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {int: [1.5, 3]}\n",
        id="23 fraction for int",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [-0.1, 1]}\n",
        id="24 lr below zero in a space",
    ),
    pytest.param(
        HEAD + "space:\n  train.schedule.warmup: {uniform: [0.0, 1.2]}\n",
        id="25 warmup in a space",
    ),
    pytest.param(
        HEAD + "space:\n  train.accumulation: {int: [1, 4]}\n",
        id="29 within a space",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimzer.lr: {uniform: [0.1, 0.2]}\n",
        id="31 misspelt path",
    ),
    pytest.param(
        HEAD + "space:\n  train.clip: {uniform: [0.1, 0.2]}\n",
        id="31 section",
    ),
    pytest.param(
        HEAD + "space: {train: {clip: {value: {uniform: [0.1, 0.2]}}}}\n",
        id="31 nested instead of dotted",
    ),
    pytest.param(
        HEAD + "space:\n  lr: {uniform: [0.1, 0.2]}\n",
        id="31 last part alone",
    ),
    pytest.param(
        HEAD + "space:\n  budget.epochs: {int: [1, 2]}\n",
        id="31 not a trial's",
    ),
    pytest.param(
        HEAD + "space:\n  resources.workers: {choice: [0, 2]}\n",
        id="31 no workers",
    ),
    pytest.param(
        HEAD + "space:\n  resources.workers: {uniform: [1, 2]}\n",
        id="31 parts of workers",
    ),
    pytest.param(
        HEAD + "space:\n  workers: {choice: [1, 2]}\n  resources.cpu: {choice: [1, 2]}\n",
        id="31 other words for workers",
    ),
    pytest.param(
        HEAD
        + "train: {sharding: fsdp, sync_batch_norm: true}\nspace:\n  resources.workers: {int: [1, 4]}\n",
        id="31 one worker where several are needed",
    ),
    pytest.param(
        HEAD
        + "space:\n  resources.workers: {choice: [1, 2]}\n  train.optimizer.lr: {uniform: [0.1, 1]}\nearly_stopping: {scheduler: pbt}\n",
        id="31 workers of a population",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1], priors: 0.5}\n",
        id="31 misspelt prior",
    ),
    pytest.param(
        HEAD + "space:\n  train.clip.colour: {int: [1, 2]}\n",
        id="31 nothing near",
    ),
    pytest.param(
        HEAD + "space:\n  task.name: {choice: [a, b]}\n",
        id="31 the task itself",
    ),
    pytest.param(
        HEAD + "space:\n  train.batch_size: {uniform: [16, 32]}\n",
        id="31 numbers for whole numbers",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.name: {uniform: [1, 2]}\n",
        id="31 numbers for names",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.name: {choice: [adam, admw]}\n",
        id="31 misspelt option",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.nesterov: {choice: [true, false]}\n",
        id="31 option that needs another key",
    ),
    pytest.param(
        HEAD + "train: {accumulation: 4}\nspace:\n  train.batch_size: {logint: [16, 256]}\n",
        id="29 within a long range",
    ),
    pytest.param(
        HEAD
        + "train: {optimizer: {name: sgd, nesterov: true}}\nspace:\n  train.optimizer.name: {choice: [sgd, adamw]}\n  train.optimizer.momentum: {uniform: [0.8, 0.9], when: {train.optimizer.name: sgd}}\n",
        id="31 option that needs a key which does not exist beside it",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.schedule.warmup: {choice: [0.1, 1.5]}\n  task.steps: {int: [1, 5]}\n",
        id="25 warmup beside a word of its rule",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.optimizer.lr: {uniform: [0.1, 1]}\n  train.optimizer.lr: {uniform: [0.1, 2]}\n",
        id="57 two keys for one field",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 1.0}\n",
        id="39 prior outside the range",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: fast}\n",
        id="39 prior that is no number",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [0.1, 0.2], prior: 0.3}\n",
        id="39 prior that is no option",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0.1, 1, 0.1], prior: 0.25}\n",
        id="39 prior between two steps",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior_width: 0.1}\n",
        id="39 width without a prior",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 0.01, prior_width: 0}\n",
        id="39 width of zero",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 0.01, prior_width: wide}\n",
        id="39 width that is no number",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 5, prior_width: 2}\n",
        id="39 prior and width outside",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {prior: 0.01}\n",
        id="39 prior without a distribution",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {int: [9007199254740993, 9007199254741003], step: 2}\n",
        id="whole numbers beyond those of a float",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {logint: [1, 9007199254740993]}\n",
        id="logint beyond the whole numbers of a float",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {quniform: [0, 1.0e+9, 0.1]}\n",
        id="more steps than a float tells apart",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {quniform: [1.0e+9, 1000000001, 0.001]}\n",
        id="few steps far from 0",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {uniform: [-1.7e+308, 1.7e+308]}\n",
        id="range wider than the largest number",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {loguniform: [1.0e-300, 1.0e+300]}\n",
        id="ratio above the largest number",
    ),
    pytest.param(
        HEAD + "space:\n  task.a: {logint: [1, 1000000000]}\nsearch: {sampler: gp}\n",
        id="more values than gp lists",
    ),
]


@pytest.mark.parametrize("text", CASES)
def test_invalid_space_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(text))


@pytest.mark.parametrize("text", CASES[-7:])
def test_sweep_that_exists_keeps_a_range_that_a_new_one_may_not_have(text: str) -> None:
    for drawn in (None, 3):
        assert parse_spec(text, "s.yaml", drawn=drawn).space
