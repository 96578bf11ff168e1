# ruff: noqa: E501, because messages are compared whole, each on one line
"""Every way to write a spec wrong, and the whole message it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.spec import SpecError, load_spec, parse_spec

HEAD = """\
name: digits
task: digits
metric: val/loss
mode: min
trials: 24
"""

FILES = [
    pytest.param(
        "",
        [
            "s.yaml:1:1: the file is empty; a spec is a mapping of keys; `sweep init` writes one to start from",
        ],
        id="01 empty file",
    ),
    pytest.param(
        "# nothing\n",
        [
            "s.yaml:1:1: the file is empty; a spec is a mapping of keys; `sweep init` writes one to start from",
        ],
        id="01 comment only",
    ),
    pytest.param(
        "- a\n",
        [
            "s.yaml:1:1: the top level is a list; a spec is a mapping of keys; begin with `name: my_sweep`",
        ],
        id="02 top-level list",
    ),
    pytest.param(
        "digits\n",
        [
            "s.yaml:1:1: the top level is a single value; a spec is a mapping of keys; begin with `name: my_sweep`",
        ],
        id="02 top-level scalar",
    ),
    pytest.param(
        "name: a\nbudget:\n\tepochs: 3\n",
        [
            "s.yaml:3:1: a tab stands where YAML expects spaces; indentation is spaces only; replace the tab by two spaces",
        ],
        id="03 tab indent",
    ),
    pytest.param(
        HEAD + "train: {batch_size: [3\nseed: 0\n",
        [
            "s.yaml:6:21: '[' is opened here and not closed properly (expected ',' or ']', but got ':'); every bracket and quote has its partner; close it",
        ],
        id="04 unclosed bracket",
    ),
    pytest.param(
        HEAD + "tracking: 'val/loss\n",
        [
            "s.yaml:6:11: a quote is opened here and not closed properly (found unexpected end of stream); every bracket and quote has its partner; close it",
        ],
        id="04 unclosed quote",
    ),
    pytest.param(
        HEAD + "train:\n  batch_size: 3\n  batch_size: 4\n",
        [
            "s.yaml:8:3: train.batch_size: the key 'batch_size' is on line 7 and again on line 8; a key appears once; remove one of them",
        ],
        id="05 duplicate key",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {learning_rte: 1}}\n",
        [
            "s.yaml:6:21: train.optimizer.learning_rte: unknown key 'learning_rte'; did you mean 'lr'?",
        ],
        id="06 misspelt key",
    ),
    pytest.param(
        HEAD + "lr: 0.1\n",
        [
            "s.yaml:6:1: lr: unknown key 'lr' here; did you mean 'train.optimizer.lr'?",
        ],
        id="06 key of another section",
    ),
    pytest.param(
        HEAD + "train: {clip: {colour: red}}\n",
        [
            "s.yaml:6:16: train.clip.colour: unknown key 'colour'; valid keys: max_norm, value",
        ],
        id="06 nothing near",
    ),
    pytest.param(
        HEAD + "train:\n  optimizer:\n    lr: 1,5e-4\n",
        [
            "s.yaml:8:9: train.optimizer.lr: '1,5e-4' has the wrong type; expected a number above 0; did you mean 1.5e-4? The decimal mark is a point",
        ],
        id="08 decimal comma",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {lr: 1,5e-4}}\n",
        [
            "s.yaml:6:27: train.optimizer.5e-4: unknown key '5e-4'; valid keys: name, lr, weight_decay, betas, momentum, nesterov, eps",
        ],
        id="08 decimal comma in braces",
    ),
    pytest.param(
        HEAD + "seed: 012\n",
        [
            "s.yaml:6:7: seed: 012 begins with a zero; some readers take such a number as octal; write 12, or '012' in quotes for text",
        ],
        id="10 leading zero",
    ),
    pytest.param(
        HEAD + "time: 12:30:00\n",
        [
            "s.yaml:6:1: time: unknown key 'time'; valid keys: version, name, task, metric, mode, trials, seed, concurrency, budget, space, search, early_stopping, stop, resources, train, checkpoint, tracking, failures",
        ],
        id="11 unknown time",
    ),
    pytest.param(
        HEAD + "seed: 12:30:00\n",
        [
            "s.yaml:6:7: seed: '12:30:00' has the wrong type; expected a whole number at least 0; write for example 0",
        ],
        id="11 sexagesimal is text",
    ),
    pytest.param(
        HEAD + "seed: !!python/object/apply:os.system [ls]\n",
        [
            "s.yaml:6:7: the tag !!python/object/apply:os.system is refused; a spec is plain data and holds no objects; remove the tag",
        ],
        id="12 python object",
    ),
    pytest.param(
        "a: " + "[" * 40 + "]" * 40,
        [
            "s.yaml:1:36: is nested deeper than 32 levels; a spec is flat; remove levels",
        ],
        id="13 nested too deep",
    ),
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
            "s.yaml:7:36: space.train.optimizer.lr.loguniform: got 3 values; loguniform takes [low, high], and a logarithmic range has no step; leave the step out",
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
            "s.yaml:7:34: space.train.optimizer.lr.quniform: high - low = 0.25 is not a whole number of steps of 0.1; high lies on a step; write [0.1, 0.3, 0.1]",
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
            "s.yaml:7:33: space.train.optimizer.lr.choice[0]: a list or a mapping cannot be an option; options are texts, numbers, true, false or null; write single values",
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
            "s.yaml:7:24: space.train.optimizer.lr.normal: unknown distribution 'normal'; valid: uniform, loguniform, quniform, int, logint, choice; did you mean 'uniform'?",
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
            "s.yaml:7:23: space.train.optimizer.lr: 2 distributions stand here; a parameter has exactly one; write one of: uniform, loguniform, quniform, int, logint, choice",
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
        HEAD + "train: {optimizer: {lr: 0}}\n",
        [
            "s.yaml:6:25: train.optimizer.lr: 0 is out of range; it must be above 0; write for example 0.001",
        ],
        id="24 lr of zero",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.lr: {uniform: [-0.1, 1]}\n",
        [
            "s.yaml:7:34: space.train.optimizer.lr.uniform[0]: -0.1 is out of range; it must be above 0; write for example 0.001",
        ],
        id="24 lr below zero in a space",
    ),
    pytest.param(
        HEAD + "train: {schedule: {warmup: 1.0}}\n",
        [
            "s.yaml:6:28: train.schedule.warmup: warmup is 1.0; it is a fraction of all steps in [0, 1), or a whole number of steps; write 0.1 for a tenth of the run or 100 for a hundred steps",
        ],
        id="25 warmup of 1.0",
    ),
    pytest.param(
        HEAD + "train: {schedule: {warmup: -0.1}}\n",
        [
            "s.yaml:6:28: train.schedule.warmup: warmup is -0.1; it is a fraction of all steps in [0, 1), or a whole number of steps; write 0.1 for a tenth of the run or 100 for a hundred steps",
        ],
        id="25 negative warmup",
    ),
    pytest.param(
        HEAD + "space:\n  train.schedule.warmup: {uniform: [0.0, 1.2]}\n",
        [
            "s.yaml:7:42: space.train.schedule.warmup.uniform[1]: warmup is 1.2; it is a fraction of all steps in [0, 1), or a whole number of steps; write 0.1 for a tenth of the run or 100 for a hundred steps",
        ],
        id="25 warmup in a space",
    ),
    pytest.param(
        HEAD + "train: {clip: {max_norm: 0}}\n",
        [
            "s.yaml:6:26: train.clip.max_norm: 0 is out of range; it must be above 0; write for example 1.0 (null switches clipping off)",
        ],
        id="27 max_norm of zero",
    ),
    pytest.param(
        HEAD + "train: {clip: {max_norm: -1}}\n",
        [
            "s.yaml:6:26: train.clip.max_norm: -1 is out of range; it must be above 0; write for example 1.0 (null switches clipping off)",
        ],
        id="27 negative max_norm",
    ),
    pytest.param(
        HEAD + "train: {accumulation: 0}\n",
        [
            "s.yaml:6:23: train.accumulation: 0 is out of range; it must be at least 1; write for example 1",
        ],
        id="28 accumulation of zero",
    ),
    pytest.param(
        HEAD + "train: {accumulation: 1.5}\n",
        [
            "s.yaml:6:23: train.accumulation: 1.5 has the wrong type; expected a whole number at least 1; write for example 1",
        ],
        id="28 accumulation of 1.5",
    ),
    pytest.param(
        HEAD + "train: {batch_size: 4, accumulation: 8}\n",
        [
            "s.yaml:6:21: train.batch_size: batch_size 4 / accumulation 8 = 0.5 samples per micro-batch; it must be whole; choose a batch_size that is a multiple of accumulation",
        ],
        id="29 micro-batch not whole",
    ),
    pytest.param(
        HEAD + "space:\n  train.accumulation: {int: [1, 4]}\n",
        [
            "s.yaml:7:29: space.train.accumulation.int: batch_size 64 / accumulation 3 = 21.3333 samples per micro-batch; it must be whole; choose a batch_size that is a multiple of accumulation",
        ],
        id="29 within a space",
    ),
    pytest.param(
        HEAD + "train: {precision: bf-16}\n",
        [
            "s.yaml:6:20: train.precision: 'bf-16' is not known here; valid: auto, fp32, bf16, fp16; did you mean 'bf16'?",
        ],
        id="30 unknown precision",
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
            "s.yaml:7:3: space.budget.epochs: 'budget.epochs' cannot be searched; a space varies what lies below train. and task.; set it in the file itself",
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
        HEAD + "train: {optimizer: {name: admw}}\n",
        [
            "s.yaml:6:27: train.optimizer.name: 'admw' is not known here; valid: sgd, adam, adamw, adafactor, lamb, lion; did you mean 'adamw'?",
        ],
        id="31 misspelt optimizer, whose defaults cannot be known",
    ),
    pytest.param(
        HEAD + "space:\n  train.optimizer.nesterov: {choice: [true, false]}\n",
        [
            "s.yaml:7:39: space.train.optimizer.nesterov.choice[0]: nesterov needs momentum above 0; set momentum: 0.9",
        ],
        id="31 option that needs another key",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 0\n",
        [
            "s.yaml:5:9: trials: 0 is out of range; it must be at least 1; write for example 24",
        ],
        id="32 no trials",
    ),
    pytest.param(
        HEAD + "concurrency: 0\n",
        [
            "s.yaml:6:14: concurrency: 0 is out of range; it must be at least 1; write for example 4 (null runs as many trials at once as the resources allow)",
        ],
        id="33 no concurrency",
    ),
    pytest.param(
        HEAD + "resources: {gpu: 1.5}\n",
        [
            "s.yaml:6:18: resources.gpu: 1.5 is neither below 1 nor whole; a GPU ask is 'auto', 0, a share below 1, or a whole number; write 0.5 to share a GPU between two trials, or 2 for two GPUs",
        ],
        id="35 gpu of 1.5",
    ),
    pytest.param(
        HEAD + "resources: {gpu: -1}\n",
        [
            "s.yaml:6:18: resources.gpu: -1 is negative; a GPU ask is 'auto', 0, a share below 1, or a whole number; write 0 for none",
        ],
        id="36 negative gpu",
    ),
    pytest.param(
        HEAD + "resources: {cpu: 0, gpu: lots}\n",
        [
            "s.yaml:6:18: resources.cpu: 0 is out of range; it must be above 0; write for example 1",
            "s.yaml:6:26: resources.gpu: 'lots' is not a GPU ask; a GPU ask is 'auto', 0, a share below 1, or a whole number; write auto, 0.5 or 1",
        ],
        id="36 gpu by a word, no cpu",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: val/loss\nmode: minimize\ntrials: 24\n",
        [
            "s.yaml:4:7: mode: 'minimize' is not known here; valid: min, max; did you mean 'min'?",
        ],
        id="39 mode by another word",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: [val/loss, 5, '']\nmode: [min, maxx, {a: 1}]\ntrials: 24\n",
        [
            "s.yaml:3:20: metric[1]: 5 is not the name of a metric; a name has 1 to 245 characters; write for example val/loss",
            "s.yaml:3:23: metric[2]: '' is not the name of a metric; a name has 1 to 245 characters; write for example val/loss",
            "s.yaml:4:13: mode[1]: 'maxx' is not known here; valid: min, max; write one of them",
            "s.yaml:4:19: mode[2]: a list or a mapping is not known here; valid: min, max; write one of them",
        ],
        id="several metrics, wrong ones",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: [val/loss]\nmode: []\ntrials: 24\n",
        [
            "s.yaml:3:9: metric: the list holds 1; a list is for two metrics or more; write a single one without brackets",
            "s.yaml:4:7: mode: the list holds 0; a list is for two metrics or more; write a single one without brackets",
        ],
        id="lists of fewer than two",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: [val/loss, val/loss, val/accuracy]\nmode: [min, max]\ntrials: 24\nsearch: {sampler: cmaes}\nearly_stopping: {reduction: 2}\nstop: {hours: 1, value: 0.1, plateau: {trials: 3}}\n",
        [
            "s.yaml:3:20: metric[1]: 'val/loss' is named before; write each one once",
            "s.yaml:4:7: mode: 2 for 3 metrics; each metric has a mode of its own; write for example [min, max, min]",
            "s.yaml:6:19: search.sampler: cmaes learns from one number, and metric names 3; write tpe or gp, or a single metric",
            "s.yaml:7:17: early_stopping.scheduler: asha compares trials by one number, and metric names 3; write scheduler: none, or a single metric",
            "s.yaml:8:25: stop.value: such a stop watches one number, and metric names 3; leave it out, or write a single metric",
            "s.yaml:8:48: stop.plateau.trials: such a stop watches one number, and metric names 3; leave it out, or write a single metric",
        ],
        id="several metrics, and what takes one",
    ),
    pytest.param(
        "name: ../x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: '../x' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        ],
        id="49 path in a name",
    ),
    pytest.param(
        "name: a\\b\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: 'a\\b' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        ],
        id="49 backslash",
    ),
    pytest.param(
        "name: ''\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: the name is empty; a name becomes a directory; write for example digits",
        ],
        id="49 empty name",
    ),
    pytest.param(
        HEAD.replace("digits", "x" * 300, 1),
        [
            "s.yaml:1:7: name: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...' has 300 characters; a name becomes a directory and holds at most 100 bytes; choose a shorter one",
        ],
        id="49 long name",
    ),
    pytest.param(
        "name: -x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: '-x' begins with '.', '-' or a blank, ends with a blank, or holds '..'; a name becomes a directory; use letters, digits, '-' and '_'",
        ],
        id="49 leading dash",
    ),
    pytest.param(
        "name: a..b\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: 'a..b' begins with '.', '-' or a blank, ends with a blank, or holds '..'; a name becomes a directory; use letters, digits, '-' and '_'",
        ],
        id="49 two dots",
    ),
    pytest.param(
        'name: "a\\nb"\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n',
        [
            "s.yaml:1:7: name: 'a\\nb' holds a control character; a name becomes a directory; use letters, digits, '-' and '_'",
        ],
        id="49 line break",
    ),
    pytest.param(
        "name: mlartifacts\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: 'mlartifacts' is where the embedded tracking store lives; a name becomes a directory beside it; choose another name",
        ],
        id="49 reserved",
    ),
    pytest.param(
        "name: 5\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:1:7: name: 5 has the wrong type; expected text; write for example digits",
        ],
        id="49 number",
    ),
    pytest.param(
        HEAD.replace("val/loss", "x" * 300),
        [
            "s.yaml:3:9: metric: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...' has the wrong length; it holds at most 245 characters; write for example val/loss",
        ],
        id="50 metric too long",
    ),
    pytest.param(
        HEAD.replace("task: digits", "task: {name: a, data: " + "x" * 6001 + "}"),
        [
            "s.yaml:2:23: task.data: the value has 6001 characters; tracking takes 6000; keep data in a file and name the file",
        ],
        id="50 argument too long",
    ),
    pytest.param(
        HEAD + "checkpoint: {every: 0 epochs}\n",
        [
            "s.yaml:6:21: checkpoint.every: '0 epochs' is not valid; an interval is a positive count and a unit, such as '1 epoch', '100 steps' or '30 seconds'",
        ],
        id="51 interval of zero",
    ),
    pytest.param(
        HEAD + "failures: {max_retries: -2}\n",
        [
            "s.yaml:6:25: failures.max_retries: -2 is out of range; it must be at least 0; write for example 2",
        ],
        id="52 negative retries",
    ),
    pytest.param(
        HEAD + "train:\n  batch_size: ${BATCH}\n",
        [
            "s.yaml:7:15: train.batch_size: ${BATCH} is not set; variables come from the environment; run `export BATCH=...` first, or write the value",
        ],
        id="53 unset variable",
    ),
    pytest.param(
        HEAD + "train:\n  precision: ${API_TOKEN}\n",
        [
            "s.yaml:7:14: train.precision: ${API_TOKEN} looks like a secret; a spec is stored and tracked in clear; let the task read API_TOKEN from the environment",
        ],
        id="53 secret",
    ),
    pytest.param(
        "name: digits\ntask: {name: x, api_key: geheim, pad_token: 0, db: {password: geheim}, use_key: true, own_token: null}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            f"s.yaml:2:{column}: task.{key}: {name} looks like a secret; a spec is stored and tracked in clear; let the task read it from the environment, or give it another name"
            for column, key, name in (
                (17, "api_key", "api_key"),
                (34, "pad_token", "pad_token"),
                (53, "db.password", "password"),
            )
        ],
        id="53 secret arguments",
    ),
    pytest.param(
        HEAD
        + "space:\n  task.hub_token: {choice: [geheim, b]}\n  task.data: {choice: ['s3://u:geheim@b', c]}\nsearch: {sampler: 'm:S', arguments: {api_key: geheim}}\n",
        [
            "s.yaml:7:3: space.task.hub_token: hub_token looks like a secret; a spec is stored and tracked in clear; let the task read it from the environment, or give it another name",
            "s.yaml:8:24: space.task.data.choice[0]: the address holds credentials; a spec is stored and tracked in clear; let the task read them from the environment",
            "s.yaml:9:38: search.arguments.api_key: api_key looks like a secret; a spec is stored and tracked in clear; let the task read it from the environment, or give it another name",
        ],
        id="53 secrets elsewhere",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: ${a b}\nmode: min\ntrials: 24\n",
        [
            "s.yaml:3:9: metric: ${a b} names no variable; a name is letters, digits and '_'; write $${ for the characters ${",
        ],
        id="53 no variable's name",
    ),
    pytest.param(
        HEAD + "early_stopping: {grace_epochs: 10}\n",
        [
            "s.yaml:6:32: early_stopping.grace_epochs: 10 is not below budget.epochs (10); early stopping needs a rung before the last epoch; write a number from 1 to 9, or scheduler: none",
        ],
        id="55 grace of all epochs",
    ),
    pytest.param(
        HEAD + "early_stopping: {}\nbudget: {epochs: 1}\n",
        [
            "s.yaml:6:17: early_stopping.grace_epochs: 1 is not below budget.epochs (1); early stopping needs a rung before the last epoch; give budget.epochs 2 or more, or write scheduler: none",
        ],
        id="55 one epoch",
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: asha_promote, grace_epochs: 10}\n",
        [
            "s.yaml:6:57: early_stopping.grace_epochs: 10 is not below budget.epochs (10); early stopping needs a rung before the last epoch; write a number from 1 to 9, or scheduler: none",
        ],
        id="55 grace of all epochs, with pauses",
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: median, grace_epochs: 12, min_trials: 0}\n",
        [
            "s.yaml:6:51: early_stopping.grace_epochs: 12 is not below budget.epochs (10); early stopping needs a rung before the last epoch; write a number from 1 to 9, or scheduler: none",
            "s.yaml:6:67: early_stopping.min_trials: 0 is out of range; it must be at least 1; write for example 3",
        ],
        id="55 grace beyond all epochs",
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: pbt, brackets: 3}\n",
        [
            "s.yaml:6:29: early_stopping.scheduler: 'pbt' is not known here; valid: asha, asha_promote, hyperband, median, none; write one of them",
            "s.yaml:6:34: early_stopping.brackets: unknown key 'brackets'; valid keys: scheduler, grace_epochs, reduction, min_trials",
        ],
        id="a scheduler that there is not",
    ),
    pytest.param(
        HEAD + "stop: {hours: 2h, value: low, plateau: {trials: 0}}\n",
        [
            "s.yaml:6:15: stop.hours: '2h' has the wrong type; expected a number above 0; write for example 2 (null sets no limit)",
            "s.yaml:6:26: stop.value: 'low' has the wrong type; expected a number; write for example 0.05",
            "s.yaml:6:49: stop.plateau.trials: 0 is out of range; it must be at least 1; write for example 20 (null switches it off)",
        ],
        id="stops that are none",
    ),
    pytest.param(
        HEAD + "stop: {hours: 0, value: .nan, plateau: 20}\n",
        [
            "s.yaml:6:15: stop.hours: 0 is out of range; it must be above 0; write for example 2 (null sets no limit)",
            "s.yaml:6:25: stop.value: .nan is out of range; it must be finite; write for example 0.05",
            "s.yaml:6:40: stop.plateau: 20 has the wrong type; expected a section with keys of its own; write the keys below it, or leave it out for the defaults",
        ],
        id="a stop at once",
    ),
    pytest.param(
        HEAD + "stop: {time_budget_s: 60, plateau: {min_delta: 0.1}}\n",
        [
            "s.yaml:6:8: stop.time_budget_s: unknown key 'time_budget_s'; did you mean 'hours'?",
            "s.yaml:6:48: stop.plateau.min_delta: min_delta is 0.1 and trials is null: without a number of trials there is no plateau; write for example trials: 20",
        ],
        id="a plateau of no trials",
    ),
    pytest.param(
        HEAD
        + "space:\n  train.optimizer.lr: {uniform: [0.1, 1]}\n  train.optimizer.lr: {uniform: [0.1, 2]}\n",
        [
            "s.yaml:8:3: space.train.optimizer.lr: the key 'train.optimizer.lr' is on line 7 and again on line 8; a key appears once; remove one of them",
        ],
        id="57 two keys for one field",
    ),
    pytest.param(
        HEAD + "version: 2\nnew_thing: 3\n",
        [
            "s.yaml:6:10: version: version 2 is newer than this program; supported: 1; upgrade gradsweep",
        ],
        id="60 newer version",
    ),
    pytest.param(
        HEAD + "version: 0\n",
        [
            "s.yaml:6:10: version: version 0 is no version of a spec; supported: 1; write 1",
        ],
        id="60 version of zero",
    ),
    pytest.param(
        HEAD + "tracking: {uri: 'http://user:geheim@host'}\n",
        [
            "s.yaml:6:17: tracking.uri: the address holds credentials; a spec is stored and tracked in clear; leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        ],
        id="credentials in tracking.uri",
    ),
    pytest.param(
        "name: digits\ntask: {name: x, data: 'pg://u:geheim@h', n: .nan}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:2:23: task.data: the address holds credentials; a spec is stored and tracked in clear; let the task read them from the environment",
            "s.yaml:2:45: task.n: .nan is not finite; numbers in a spec are finite; write a number, or null",
        ],
        id="credentials in an argument",
    ),
    pytest.param(
        "{}\n",
        [
            "s.yaml:1:1: name: is missing; it has no default; add `name: digits`",
            "s.yaml:1:1: task: is missing; it has no default; add `task: digits`",
            "s.yaml:1:1: metric: is missing; it has no default; add `metric: val/loss`",
            "s.yaml:1:1: mode: is missing; it has no default; add `mode: min`",
            "s.yaml:1:1: trials: is missing; it has no default; add `trials: 24`",
        ],
        id="all missing",
    ),
    pytest.param(
        HEAD + "train: 3\nspace: [1]\nbudget:\n",
        [
            "s.yaml:6:8: train: 3 has the wrong type; expected a section with keys of its own; write the keys below it, or leave it out for the defaults",
            "s.yaml:7:8: space: [1] has the wrong type; expected a section with keys of its own; write the keys below it, or leave it out for the defaults",
            "s.yaml:8:1: budget: null has the wrong type; expected a section with keys of its own; write the keys below it, or leave it out for the defaults",
        ],
        id="sections of the wrong kind",
    ),
    pytest.param(
        "name: digits\ntask: {hidden: 3}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:2:7: task.name: is missing; it has no default; add `name: digits`",
        ],
        id="task without a name",
    ),
    pytest.param(
        HEAD + "seed: 99999999999999999999\n",
        [
            "s.yaml:6:7: seed: 99999999999999999999 is too large; whole numbers hold 63 bits; write a smaller number",
        ],
        id="huge number",
    ),
    pytest.param(
        HEAD + "---\na: 1\n",
        [
            "s.yaml:6:1: a second document begins; a spec is one document; remove the line '---'",
        ],
        id="two documents",
    ),
    pytest.param(
        HEAD + "seed: *x\n",
        [
            "s.yaml:6:7: *x refers to nothing; an alias needs an anchor &x before it; write the value, or put a text with * in quotes",
        ],
        id="alias of nothing",
    ),
    pytest.param(
        HEAD + "seed: @x\n",
        [
            "s.yaml:6:7: not YAML (found character '@' that cannot start any token); values with special characters stand in quotes; correct the line, or quote the text",
        ],
        id="special character",
    ),
    pytest.param(
        HEAD + " seed: 3\n",
        [
            "s.yaml:6:6: a second ':' in one value, or a wrong indentation; keys of one mapping start in one column; align it, or put the text in quotes",
        ],
        id="wrong indentation",
    ),
    pytest.param(
        "name: \x01\n",
        [
            "s.yaml:1:7: character 0x01 is not allowed; YAML is printable text; remove it, or write it as an escape in double quotes",
        ],
        id="control character",
    ),
    pytest.param(
        'name: digits\ntask: digits\nmetric: "\\ud800"\nmode: min\ntrials: 24\n',
        [
            "s.yaml:3:9: metric: '\\ud800' holds half a character; text is Unicode; write the character itself",
        ],
        id="half a character",
    ),
    pytest.param(
        HEAD
        + "train: {clip: {max_norm: 0}, batch_size: 5, accumulation: 2, nope: 1}\nspace: {train.optimizer.lr: {uniform: [0, 1]}}\nbudget: {epochs: 1}\nearly_stopping: {grace_epochs: 2}\n",
        [
            "s.yaml:6:26: train.clip.max_norm: 0 is out of range; it must be above 0; write for example 1.0 (null switches clipping off)",
            "s.yaml:6:42: train.batch_size: batch_size 5 / accumulation 2 = 2.5 samples per micro-batch; it must be whole; choose a batch_size that is a multiple of accumulation",
            "s.yaml:6:62: train.nope: unknown key 'nope'; valid keys: batch_size, accumulation, precision, optimizer, schedule, clip, loader, deterministic, layer_norms_every, measure_device_time, compile, channels_last, activation_checkpointing",
            "s.yaml:7:40: space.train.optimizer.lr.uniform[0]: 0 is out of range; it must be above 0; write for example 0.001",
            "s.yaml:9:32: early_stopping.grace_epochs: 2 is not below budget.epochs (1); early stopping needs a rung before the last epoch; give budget.epochs 2 or more, or write scheduler: none",
        ],
        id="all in one pass",
    ),
]

OVERRIDES = [
    pytest.param(
        ["trials"],
        [
            "-s trials: there is no '='; an override is KEY=VALUE; write -s trials=VALUE",
        ],
        id="58 no equals sign",
    ),
    pytest.param(
        ["train.optimiser.lr=3"],
        [
            "-s train.optimiser.lr=3: train.optimiser.lr: unknown key 'optimiser'; did you mean 'optimizer'?",
        ],
        id="59 misspelt path",
    ),
    pytest.param(
        ["trials.x=3"],
        [
            "-s trials.x=3: trials.x: 'trials' is a single value; it has no keys below it; write -s trials=VALUE",
        ],
        id="59 below a value",
    ),
    pytest.param(
        ["trials=[1"],
        [
            "-s trials=[1: '[' is opened here and not closed properly (expected ',' or ']', but got '<stream end>'); every bracket and quote has its partner; close it",
        ],
        id="59 not YAML",
    ),
    pytest.param(
        ["trials=0"],
        [
            "-s trials=0: trials: 0 is out of range; it must be at least 1; write for example 24",
        ],
        id="59 wrong value",
    ),
    pytest.param(
        ["train.batch_size=${BATCH}"],
        [
            "-s train.batch_size=${BATCH}: train.batch_size: ${BATCH} is not set; variables come from the environment; run `export BATCH=...` first, or write the value",
        ],
        id="59 unset variable",
    ),
    pytest.param(
        ["mode=max", "trials", "seed=-1"],
        [
            "-s trials: there is no '='; an override is KEY=VALUE; write -s trials=VALUE",
            "-s seed=-1: seed: -1 is out of range; it must be at least 0; write for example 0",
        ],
        id="59 several",
    ),
    pytest.param(
        ["tracking.uri=http://user:geheim@host"],
        [
            "-s tracking.uri=http://***@host: tracking.uri: the address holds credentials; a spec is stored and tracked in clear; leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        ],
        id="59 credentials",
    ),
    pytest.param(
        ["task.api_key=geheim"],
        [
            "-s task.api_key=[hidden]: task.api_key: api_key looks like a secret; a spec is stored and tracked in clear; let the task read it from the environment, or give it another name",
        ],
        id="59 secret",
    ),
    pytest.param(
        ["space.train.optimizer.lr={uniform: [1, 0]}"],
        [
            "-s space.train.optimizer.lr={uniform: [1, 0]}: space.train.optimizer.lr.uniform: low 1 is above high 0; low is below high; write [0, 1]",
        ],
        id="59 space",
    ),
]


@pytest.mark.parametrize(("text", "expected"), FILES)
def test_the_whole_message_of_a_wrong_file(text: str, expected: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "s.yaml", environ={})
    assert str(caught.value).split("\n") == expected
    assert len(caught.value.problems) == len(expected)


@pytest.mark.parametrize(("overrides", "expected"), OVERRIDES)
def test_the_whole_message_of_a_wrong_override(overrides: list[str], expected: list[str]) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(HEAD, "s.yaml", overrides, environ={})
    assert str(caught.value).split("\n") == expected


def _load(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        load_spec(path, environ={})
    return str(caught.value)


def test_a_file_over_the_size_limit(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    message = _load(path, HEAD.encode() + b"# " + b"x" * 1024 * 1024)
    assert message == (
        f"{path}: is larger than 1048576 bytes; a spec is a short file; keep data in files of its own"
    )


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    assert _load(path, b"name: caf\xe9\n") == (
        f"{path}: byte 9 (0xe9) is not UTF-8; a spec is UTF-8 text; save the file as UTF-8"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    with pytest.raises(SpecError) as caught:
        load_spec(path)
    assert str(caught.value) == (
        f"{path}: there is no such file; a spec is a YAML file; `sweep init` writes one to start from"
    )


def test_a_directory_is_not_a_spec(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load_spec(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: cannot be read (Is a directory); a spec is a YAML file; name a readable one"
    )


def test_aliases_are_counted_in_full(tmp_path: Path) -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for before, name in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]")
    assert _load(tmp_path / "s.yaml", "\n".join(lines).encode()) == (
        f"{tmp_path / 's.yaml'}:1:35: holds more than 10000 values, aliases counted in full; a spec is a short file; remove aliases or keep data in files of its own"
    )


def test_a_long_file_is_given_up_early(tmp_path: Path) -> None:
    message = _load(tmp_path / "s.yaml", b"a: [" + b"1," * 400_000 + b"]")
    assert "holds more than 10000 values" in message


def test_options_are_named_as_the_place(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_spec(path, name="../x", tracking_uri="http://user:geheim@host")
    assert str(caught.value).split("\n") == [
        "--name ../x: name: '../x' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        "--tracking-uri http://***@host: tracking.uri: the address holds credentials; a spec is stored and tracked in clear; leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
    ]
