# ruff: noqa: E501, because a spec stands on one line
"""Every invalid search space is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

import pytest

from sweeps.spec.spec import parse_spec
from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

CASES = {
    "16 log from zero": HEAD + "space:\n  train.optimizer.lr: {loguniform: [0, 1]}\n",
    "16 logint from zero": HEAD + "space:\n  train.batch_size: {logint: [0, 8]}\n",
    "17 low above high": HEAD + "space:\n  train.optimizer.lr: {uniform: [0.3, 0.1]}\n",
    "18 low equals high": HEAD + "space:\n  train.optimizer.lr: {uniform: [0.3, 0.3]}\n",
    "19 NaN bound": HEAD + "space:\n  train.optimizer.lr: {uniform: [.nan, 1]}\n",
    "20 infinite bound": HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, .inf]}\n",
    "21 log with step": HEAD + "space:\n  train.optimizer.lr: {loguniform: [0.1, 1, 0.1]}\n",
    "21 uniform with step": HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1, 0.1]}\n",
    "21 steps that do not fit": HEAD
    + "space:\n  train.optimizer.lr: {quniform: [0.1, 0.35, 0.1]}\n",
    "21 step of zero": HEAD + "space:\n  train.optimizer.lr: {quniform: [0.1, 0.3, 0]}\n",
    "21 more steps than are counted": HEAD
    + "space:\n  train.optimizer.lr: {quniform: [0, 1, 1.0e-30]}\n",
    "22 empty choices": HEAD + "space:\n  train.optimizer.lr: {choice: []}\n",
    "22 equal choices": HEAD + "space:\n  train.optimizer.lr: {choice: [1, 1.0]}\n",
    "22 nested choices": HEAD + "space:\n  train.optimizer.lr: {choice: [[1]]}\n",
    "22 infinite choice": HEAD + "space:\n  train.optimizer.lr: {choice: [.inf]}\n",
    "23 unknown distribution": HEAD + "space:\n  train.optimizer.lr: {normal: [0, 1]}\n",
    "23 constant": HEAD + "space:\n  train.optimizer.lr: 0.1\n",
    "23 two distributions": HEAD
    + "space:\n  train.optimizer.lr: {uniform: [0.1, 1], int: [1, 2]}\n",
    "23 bounds not a list": HEAD + "space:\n  train.optimizer.lr: {uniform: 3}\n",
    "23 text bound": HEAD + "space:\n  train.optimizer.lr: {uniform: [a, 1]}\n",
    "23 fraction for int": HEAD + "space:\n  train.optimizer.lr: {int: [1.5, 3]}\n",
    "24 lr below zero in a space": HEAD + "space:\n  train.optimizer.lr: {uniform: [-0.1, 1]}\n",
    "25 warmup in a space": HEAD + "space:\n  train.schedule.warmup: {uniform: [0.0, 1.2]}\n",
    "29 within a space": HEAD + "space:\n  train.accumulation: {int: [1, 4]}\n",
    "31 misspelt path": HEAD + "space:\n  train.optimzer.lr: {uniform: [0.1, 0.2]}\n",
    "31 section": HEAD + "space:\n  train.clip: {uniform: [0.1, 0.2]}\n",
    "31 nested instead of dotted": HEAD
    + "space: {train: {clip: {value: {uniform: [0.1, 0.2]}}}}\n",
    "31 last part alone": HEAD + "space:\n  lr: {uniform: [0.1, 0.2]}\n",
    "31 not a trial's": HEAD + "space:\n  budget.epochs: {int: [1, 2]}\n",
    "31 no workers": HEAD + "space:\n  resources.workers: {choice: [0, 2]}\n",
    "31 parts of workers": HEAD + "space:\n  resources.workers: {uniform: [1, 2]}\n",
    "31 other words for workers": HEAD
    + "space:\n  workers: {choice: [1, 2]}\n  resources.cpu: {choice: [1, 2]}\n",
    "31 one worker where several are needed": HEAD
    + "train: {sharding: fsdp, sync_batch_norm: true}\nspace:\n  resources.workers: {int: [1, 4]}\n",
    "31 workers of a population": HEAD
    + "space:\n  resources.workers: {choice: [1, 2]}\n  train.optimizer.lr: {uniform: [0.1, 1]}\nearly_stopping: {scheduler: pbt}\n",
    "31 misspelt prior": HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1], priors: 0.5}\n",
    "31 nothing near": HEAD + "space:\n  train.clip.colour: {int: [1, 2]}\n",
    "31 the task itself": HEAD + "space:\n  task.name: {choice: [a, b]}\n",
    "31 numbers for whole numbers": HEAD + "space:\n  train.batch_size: {uniform: [16, 32]}\n",
    "31 numbers for names": HEAD + "space:\n  train.optimizer.name: {uniform: [1, 2]}\n",
    "31 misspelt option": HEAD + "space:\n  train.optimizer.name: {choice: [adam, admw]}\n",
    "31 option that needs another key": HEAD
    + "space:\n  train.optimizer.nesterov: {choice: [true, false]}\n",
    "29 within a long range": HEAD
    + "train: {accumulation: 4}\nspace:\n  train.batch_size: {logint: [16, 256]}\n",
    "31 option that needs a key which does not exist beside it": HEAD
    + "train: {optimizer: {name: sgd, nesterov: true}}\nspace:\n  train.optimizer.name: {choice: [sgd, adamw]}\n  train.optimizer.momentum: {uniform: [0.8, 0.9], when: {train.optimizer.name: sgd}}\n",
    "25 warmup beside a word of its rule": HEAD
    + "space:\n  train.schedule.warmup: {choice: [0.1, 1.5]}\n  task.steps: {int: [1, 5]}\n",
    "57 two keys for one field": HEAD
    + "space:\n  train.optimizer.lr: {uniform: [0.1, 1]}\n  train.optimizer.lr: {uniform: [0.1, 2]}\n",
    "39 prior outside the range": HEAD
    + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 1.0}\n",
    "39 prior that is no number": HEAD
    + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: fast}\n",
    "39 prior that is no option": HEAD
    + "space:\n  train.optimizer.lr: {choice: [0.1, 0.2], prior: 0.3}\n",
    "39 prior between two steps": HEAD
    + "space:\n  train.optimizer.lr: {quniform: [0.1, 1, 0.1], prior: 0.25}\n",
    "39 width without a prior": HEAD
    + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior_width: 0.1}\n",
    "39 width of zero": HEAD
    + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 0.01, prior_width: 0}\n",
    "39 width that is no number": HEAD
    + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 0.01, prior_width: wide}\n",
    "39 prior and width outside": HEAD
    + "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 0.1], prior: 5, prior_width: 2}\n",
    "39 prior without a distribution": HEAD + "space:\n  train.optimizer.lr: {prior: 0.01}\n",
    "whole numbers beyond those of a float": HEAD
    + "space:\n  task.a: {int: [9007199254740993, 9007199254741003], step: 2}\n",
    "logint beyond the whole numbers of a float": HEAD
    + "space:\n  task.a: {logint: [1, 9007199254740993]}\n",
    "more steps than a float tells apart": HEAD
    + "space:\n  task.a: {quniform: [0, 1.0e+9, 0.1]}\n",
    "few steps far from 0": HEAD + "space:\n  task.a: {quniform: [1.0e+9, 1000000001, 0.001]}\n",
    "range wider than the largest number": HEAD
    + "space:\n  task.a: {uniform: [-1.7e+308, 1.7e+308]}\n",
    "ratio above the largest number": HEAD
    + "space:\n  task.a: {loguniform: [1.0e-300, 1.0e+300]}\n",
    "more values than gp lists": HEAD
    + "space:\n  task.a: {logint: [1, 1000000000]}\nsearch: {sampler: gp}\n",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_invalid_space_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(text))


@pytest.mark.parametrize("text", list(CASES.values())[-7:])
def test_sweep_that_exists_keeps_a_range_that_a_new_one_may_not_have(text: str) -> None:
    for drawn in (None, 3):
        assert parse_spec(text, "s.yaml", drawn=drawn).space
