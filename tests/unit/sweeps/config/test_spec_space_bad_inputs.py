# ruff: noqa: E501, because messages are compared whole, each on one line
"""Every way to write a search space wrong, and the whole message it gets."""

from __future__ import annotations

import pytest

from tests.unit.sweeps.refused import HEAD, refusal

CASES = [
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [0, 1]}\n",
        [
            "s.yaml:7:37: space.train.optimizer.lr.loguniform[0]: low is 0; a logarithmic range begins above 0; write a small number above 0, or use uniform",
        ],
        id="16 log from zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.batch_size: {logint: [0, 8]}\n",
        [
            "s.yaml:7:31: space.train.batch_size.logint[0]: low is 0; a logarithmic range begins above 0; write a small number above 0, or use int",
        ],
        id="16 logint from zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.3, 0.1]}\n",
        [
            "s.yaml:7:33: space.train.optimizer.lr.uniform: low 0.3 is above high 0.1; low is below high; write [0.1, 0.3]",
        ],
        id="17 low above high",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.3, 0.3]}\n",
        [
            "s.yaml:7:33: space.train.optimizer.lr.uniform: low and high are both 0.3; low is below high; use a constant: set the key itself and leave it out of `space`",
        ],
        id="18 low equals high",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [.nan, 1]}\n",
        [
            "s.yaml:7:34: space.train.optimizer.lr.uniform[0]: low is .nan; bounds are finite; write a number",
        ],
        id="19 NaN bound",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, .inf]}\n",
        [
            "s.yaml:7:39: space.train.optimizer.lr.uniform[1]: high is .inf; bounds are finite; write a number",
        ],
        id="20 infinite bound",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {loguniform: [0.1, 1, 0.1]}\n",
        [
            "s.yaml:7:36: space.train.optimizer.lr.loguniform: got 3 values; loguniform takes [low, high], and a logarithmic range has no step; leave the third out, or write powers: [low, high, factor], such as powers: [16, 256, 2]",
        ],
        id="21 log with step",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1, 0.1]}\n",
        [
            "s.yaml:7:33: space.train.optimizer.lr.uniform: got 3 values; uniform takes [low, high]; leave the third out, or use quniform for steps",
        ],
        id="21 uniform with step",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0.1, 0.35, 0.1]}\n",
        [
            "s.yaml:7:34: space.train.optimizer.lr.quniform: high - low = 0.25 is not a whole number of steps of 0.1; high must be on a step; write [0.1, 0.3, 0.1]",
        ],
        id="21 steps that do not fit",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0.1, 0.3, 0]}\n",
        [
            "s.yaml:7:45: space.train.optimizer.lr.quniform[2]: step is 0; a step is above 0; write a number above 0",
        ],
        id="21 step of zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {quniform: [0, 1, 1.0e-30]}\n",
        [
            "s.yaml:7:34: space.train.optimizer.lr.quniform: high - low = 1 is 1e+28 steps of 1e-30 or more; steps are counted; write a larger step, or use uniform",
        ],
        id="21 more steps than are counted",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: []}\n",
        [
            "s.yaml:7:32: space.train.optimizer.lr.choice: there is nothing to choose from; a choice has at least one option; write choice: [a, b]",
        ],
        id="22 empty choices",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [1, 1.0]}\n",
        [
            "s.yaml:7:36: space.train.optimizer.lr.choice[1]: 1.0 equals option 1; options differ; remove one of them",
        ],
        id="22 equal choices",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [[1]]}\n",
        [
            "s.yaml:7:33: space.train.optimizer.lr.choice[0]: [1] has the wrong type; expected a number above 0; write for example 0.001",
        ],
        id="22 nested choices",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {choice: [.inf]}\n",
        [
            "s.yaml:7:33: space.train.optimizer.lr.choice[0]: .inf is not finite; options that are numbers are finite; write a number",
        ],
        id="22 infinite choice",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {normal: [0, 1]}\n",
        [
            "s.yaml:7:24: space.train.optimizer.lr.normal: unknown distribution 'normal'; valid: uniform, loguniform, quniform, int, logint, powers, choice; did you mean 'uniform'?",
        ],
        id="23 unknown distribution",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: 0.1\n",
        [
            "s.yaml:7:23: space.train.optimizer.lr: 0.1 is not a distribution; a space holds one distribution per key; write {choice: [...]} or {uniform: [low, high]}, or move a fixed value out of `space`",
        ],
        id="23 constant",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [0.1, 1], int: [1, 2]}\n",
        [
            "s.yaml:7:23: space.train.optimizer.lr: there are 2 distributions; a parameter has exactly one; write one of: uniform, loguniform, quniform, int, logint, powers, choice",
        ],
        id="23 two distributions",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: 3}\n",
        [
            "s.yaml:7:33: space.train.optimizer.lr.uniform: got 3; uniform takes [low, high]; write uniform: [low, high]",
        ],
        id="23 bounds not a list",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [a, 1]}\n",
        [
            "s.yaml:7:34: space.train.optimizer.lr.uniform[0]: 'a' is not a number; low is a number; write one, such as 0.1",
        ],
        id="23 text bound",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {int: [1.5, 3]}\n",
        [
            "s.yaml:7:30: space.train.optimizer.lr.int[0]: low is 1.5; int takes whole numbers; write one, or use uniform",
        ],
        id="23 fraction for int",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [-0.1, 1]}\n",
        [
            "s.yaml:7:34: space.train.optimizer.lr.uniform[0]: -0.1 is out of range; it must be above 0; write for example 0.001",
        ],
        id="24 lr below zero in a space",
    ),
    pytest.param(
        HEAD + "space:\n  train.schedule.warmup: {uniform: [0.0, 1.2]}\n",
        [
            "s.yaml:7:42: space.train.schedule.warmup.uniform[1]: warmup is 1.2; it is a fraction of all steps in [0, 1), or a whole number of steps; write 0.1 for a tenth of the run or 100 for a hundred steps",
        ],
        id="25 warmup in a space",
    ),
    pytest.param(
        HEAD + "space:\n  train.accumulation: {int: [1, 4]}\n",
        [
            "s.yaml:7:29: space.train.accumulation.int: batch_size 64 / accumulation 3 = 21.3333 samples per micro-batch; it must be whole; choose a batch_size that is a multiple of accumulation",
        ],
        id="29 within a space",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimzer.lr: {uniform: [0.1, 0.2]}\n",
        [
            "s.yaml:7:3: space.train.optimzer.lr: 'train.optimzer.lr' names no field of the spec; did you mean 'train.optimizer.lr'?",
        ],
        id="31 misspelt path",
    ),
    pytest.param(
        HEAD + "space:\n  train.clip: {uniform: [0.1, 0.2]}\n",
        [
            "s.yaml:7:3: space.train.clip: 'train.clip' is a section; a space names single fields by their dotted path; write one of: train.clip.max_norm, train.clip.value",
        ],
        id="31 section",
    ),
    pytest.param(
        HEAD + "space: {train: {clip: {value: {uniform: [0.1, 0.2]}}}}\n",
        [
            "s.yaml:6:9: space.train: 'train' is a section; a space names single fields by their dotted path; write one of: train.batch_size, train.accumulation, train.precision, train.optimizer.name, train.optimizer.lr, train.optimizer.weight_decay, train.optimizer.betas, train.optimizer.momentum, ...",
        ],
        id="31 nested instead of dotted",
    ),
    pytest.param(
        HEAD + "space:\n  lr: {uniform: [0.1, 0.2]}\n",
        [
            "s.yaml:7:3: space.lr: 'lr' names no field of the spec; did you mean 'train.optimizer.lr'?",
        ],
        id="31 last part alone",
    ),
    pytest.param(
        HEAD + "space:\n  budget.epochs: {int: [1, 2]}\n",
        [
            "s.yaml:7:3: space.budget.epochs: 'budget.epochs' cannot be searched; a space varies keys below train. and task.; set it in the file itself",
        ],
        id="31 not a trial's",
    ),
    pytest.param(
        HEAD + "space:\n  train.clip.colour: {int: [1, 2]}\n",
        [
            "s.yaml:7:3: space.train.clip.colour: 'train.clip.colour' names no field of the spec; did you mean 'train.clip.value'?",
        ],
        id="31 nothing near",
    ),
    pytest.param(
        HEAD + "space:\n  task.name: {choice: [a, b]}\n",
        [
            "s.yaml:7:3: space.task.name: 'task.name' cannot be searched; a space varies arguments of one task; write task.ARGUMENT",
        ],
        id="31 the task itself",
    ),
    pytest.param(
        HEAD + "space:\n  train.batch_size: {uniform: [16, 32]}\n",
        [
            "s.yaml:7:22: space.train.batch_size.uniform: uniform draws numbers; train.batch_size takes a whole number at least 1; use int or logint",
        ],
        id="31 numbers for whole numbers",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.name: {uniform: [1, 2]}\n",
        [
            "s.yaml:7:26: space.train.optimizer.name.uniform: uniform draws numbers; train.optimizer.name takes one of: sgd, adam, adamw, adafactor, lamb, lion; use choice: [...]",
        ],
        id="31 numbers for names",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.name: {choice: [adam, admw]}\n",
        [
            "s.yaml:7:41: space.train.optimizer.name.choice[1]: 'admw' is not known here; valid: sgd, adam, adamw, adafactor, lamb, lion; did you mean 'adamw'?",
        ],
        id="31 misspelt option",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.nesterov: {choice: [true, false]}\n",
        [
            "s.yaml:7:39: space.train.optimizer.nesterov.choice[0]: nesterov needs momentum above 0; set momentum: 0.9",
        ],
        id="31 option that needs another key",
    ),
    pytest.param(
        HEAD + "train: {accumulation: 4}\nspace:\n  train.batch_size: {logint: [16, 256]}\n",
        [
            "s.yaml:8:30: space.train.batch_size.logint: batch_size 17 / accumulation 4 = 4.25 samples per micro-batch; it must be whole; choose a batch_size that is a multiple of accumulation",
        ],
        id="29 within a long range",
    ),
    pytest.param(
        HEAD
        + "train: {optimizer: {name: sgd, nesterov: true}}\nspace:\n  train.optimizer.name: {choice: [sgd, adamw]}\n  train.optimizer.momentum: {uniform: [0.8, 0.9], when: {train.optimizer.name: sgd}}\n",
        [
            "s.yaml:8:40: space.train.optimizer.name.choice[1]: nesterov needs momentum above 0; set momentum: 0.9",
        ],
        id="31 option that needs a key which does not exist beside it",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.schedule.warmup: {choice: [0.1, 1.5]}\n  task.steps: {int: [1, 5]}\n",
        [
            "s.yaml:7:41: space.train.schedule.warmup.choice[1]: warmup is 1.5; it is a fraction of all steps in [0, 1), or a whole number of steps; write 0.1 for a tenth of the run or 100 for a hundred steps",
        ],
        id="25 warmup beside a word of its rule",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.optimizer.lr: {uniform: [0.1, 1]}\n  train.optimizer.lr: {uniform: [0.1, 2]}\n",
        [
            "s.yaml:8:3: space.train.optimizer.lr: the key 'train.optimizer.lr' is on line 7 and again on line 8; a key appears once; remove one of them",
        ],
        id="57 two keys for one field",
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_the_whole_message(text: str, expected: list[str]) -> None:
    assert refusal(text) == expected
