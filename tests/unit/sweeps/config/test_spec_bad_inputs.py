# ruff: noqa: E501, because messages are compared whole, each on one line
"""Every way to write the fields of a spec wrong, and the whole message it gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.config.spec import load_spec
from sweeps.errors import SpecError
from tests.unit.sweeps.refused import HEAD, refusal

CASES = [
    pytest.param(
        HEAD + "train: {optimizer: {lr: 0}}\n",
        [
            "s.yaml:6:25: train.optimizer.lr: 0 is out of range; it must be above 0; write for example 0.001",
        ],
        id="24 lr of zero",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {lr: 1e400}}\nstop: {hours: .inf}\n",
        [
            "s.yaml:6:25: train.optimizer.lr: 1e400 is out of range; it must be finite and above 0; write for example 0.001",
            "s.yaml:7:15: stop.hours: .inf is out of range; it must be finite and above 0; write for example 2 (null sets no limit)",
        ],
        id="24 what is above 0 and no number",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {betas: [-0.1, 1]}}\n",
        [
            "s.yaml:6:29: train.optimizer.betas[0]: -0.1 is not a decay rate; it must be at least 0 and below 1; write for example 0.9",
            "s.yaml:6:35: train.optimizer.betas[1]: 1 is not a decay rate; it must be at least 0 and below 1; write for example 0.9",
        ],
        id="decay rates that are none",
    ),
    pytest.param(
        HEAD + "resources: {cpu: 1.0e-5, gpu: 1.0e-5}\n",
        [
            "s.yaml:6:18: resources.cpu: 1.0e-5 is too small; Ray counts in ten-thousandths; write 0.0001 or more",
            "s.yaml:6:31: resources.gpu: 1.0e-5 is too small; Ray counts in ten-thousandths; write 0.0001 or more",
        ],
        id="shares that Ray does not count",
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
        HEAD + "train: {precision: bf-16}\n",
        [
            "s.yaml:6:20: train.precision: 'bf-16' is not known here; valid: auto, fp32, bf16, fp16; did you mean 'bf16'?",
        ],
        id="30 unknown precision",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {name: admw}}\n",
        [
            "s.yaml:6:27: train.optimizer.name: 'admw' is not known here; valid: sgd, adam, adamw, adafactor, lamb, lion; did you mean 'adamw'?",
        ],
        id="31 misspelt optimizer, whose defaults cannot be known",
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
            "s.yaml:3:20: metric[1]: 'val/loss' is listed twice; list each one once",
            "s.yaml:4:7: mode: 2 for 3 metrics; each metric has a mode of its own; write for example [min, max, min]",
            "s.yaml:6:19: search.sampler: cmaes learns from one metric, and there are 3; write tpe or gp, or a single metric",
            "s.yaml:7:17: early_stopping.scheduler: asha compares trials by one metric, and there are 3; write scheduler: none, or a single metric",
            "s.yaml:8:25: stop.value: this criterion watches one metric, and there are 3; leave it out, or write a single metric",
            "s.yaml:8:48: stop.plateau.trials: this criterion watches one metric, and there are 3; leave it out, or write a single metric",
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
            "s.yaml:1:7: name: 'mlartifacts' is the name of the embedded tracking store; a name becomes a directory beside it; choose another name",
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
            "s.yaml:2:23: task.data: the value has 6001 characters; tracking accepts at most 6000; keep data in a file and name the file",
        ],
        id="50 argument too long",
    ),
    pytest.param(
        HEAD.replace("task: digits", "task: {name: a, " + "k" * 246 + ": 1}"),
        [
            f"s.yaml:2:17: task.{'k' * 246}: the key has 246 characters; tracking accepts at most 245; choose a shorter one",
        ],
        id="50 key too long",
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
        HEAD + "early_stopping: {scheduler: pbt, interval_epochs: 10, quantile: 0.6}\n",
        [
            "s.yaml:6:29: early_stopping.scheduler: pbt changes parameters below train.optimizer. and train.clip. while trials train, and the space has none; search for example train.optimizer.lr, or write scheduler: asha",
            "s.yaml:6:51: early_stopping.interval_epochs: 10 is not below budget.epochs (10); pbt compares trials before their last epoch; write a smaller interval, or more epochs",
            "s.yaml:6:65: early_stopping.quantile: 0.6 is out of range; it must be above 0 and at most 0.5; write for example 0.25",
        ],
        id="pbt: nobody to compare, nothing to change",
    ),
    pytest.param(
        HEAD.replace("trials: 24", "trials: 1")
        + "space:\n  train.batch_size: {choice: [32, 64]}\nearly_stopping: {scheduler: pb2}\n",
        [
            "s.yaml:5:9: trials: 1 trials are not a population; pb2 compares trials with each other; write 4 or more",
            "s.yaml:7:3: space.train.batch_size: train.batch_size cannot be searched by pb2: trials copy each other's weights, so a step must be the same in all of them; set it in the file itself",
            "s.yaml:8:29: early_stopping.scheduler: pb2 changes parameters below train.optimizer. and train.clip. while trials train, and the space has none; search for example train.optimizer.lr, or write scheduler: asha",
        ],
        id="pb2: one member, and steps that differ",
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: genetic, brackets: 3}\n",
        [
            "s.yaml:6:29: early_stopping.scheduler: 'genetic' is not known here; valid: asha, asha_promote, hyperband, median, pbt, pb2, none; write one of them",
            "s.yaml:6:38: early_stopping.brackets: unknown key 'brackets'; valid keys: scheduler, grace_epochs, reduction, min_trials, interval_epochs, quantile, resample",
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
            "s.yaml:6:17: tracking.uri: the address holds credentials; a spec is stored and tracked unencrypted; leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        ],
        id="credentials in tracking.uri",
    ),
    pytest.param(
        HEAD + "storage: {ledger: 'postgresql://ada:geheim@host/sweeps'}\n",
        [
            "s.yaml:6:19: storage.ledger: the address holds credentials; a spec is stored and tracked unencrypted; leave the password out and set PGPASSWORD or PGPASSFILE in the environment",
        ],
        id="a password in storage.ledger",
    ),
    pytest.param(
        HEAD + "storage: {ledger: 'mysql://ada@host/sweeps'}\n",
        [
            "s.yaml:6:19: storage.ledger: 'mysql://[hidden]@host/sweeps' is not the address of a PostgreSQL database; a ledger is in one, or in a file of the sweep's directory; write postgresql://HOST/DATABASE, or null",
        ],
        id="storage.ledger in another kind of database",
    ),
    pytest.param(
        HEAD + "storage: {checkpoints: 's3://ada:geheim@bucket/sweeps'}\n",
        [
            "s.yaml:6:24: storage.checkpoints: the address holds credentials; a spec is stored and tracked unencrypted; leave them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment",
        ],
        id="credentials in storage.checkpoints",
    ),
    pytest.param(
        HEAD + "storage: {checkpoints: '/mnt/checkpoints'}\n",
        [
            "s.yaml:6:24: storage.checkpoints: '/mnt/checkpoints' is not a prefix in an object store; checkpoints are below s3://BUCKET/PREFIX, made of letters, digits, '.', '-', '_' and single '/', or in the sweep's directory; write for example s3://my-bucket/sweeps, or null",
        ],
        id="storage.checkpoints in a directory",
    ),
    pytest.param(
        HEAD + "storage: {checkpoints: 's3://bucket/a/../b'}\n",
        [
            "s.yaml:6:24: storage.checkpoints: 's3://bucket/a/../b' is not a prefix in an object store; checkpoints are below s3://BUCKET/PREFIX, made of letters, digits, '.', '-', '_' and single '/', or in the sweep's directory; write for example s3://my-bucket/sweeps, or null",
        ],
        id="storage.checkpoints with a step upwards",
    ),
    pytest.param(
        HEAD
        + "space: {train.optimizer.lr: {uniform: [0.1, 1]}}\n"
        + "early_stopping: {scheduler: pbt}\n"
        + "storage: {checkpoints: 's3://bucket/sweeps'}\n",
        [
            "s.yaml:8:24: storage.checkpoints: pbt copies checkpoints between trials as hard links, and an object store has no links; leave it out, or write another scheduler",
        ],
        id="a population in an object store",
    ),
    pytest.param(
        HEAD
        + "tracking: {uri: 'postgresql+psycopg2://ada@host/all'}\n"
        + "storage: {ledger: 'postgresql://ada@host/all'}\n",
        [
            "s.yaml:7:19: storage.ledger: tracking.uri names the same database; each needs one of its own, because both store their schema version in the same table; create another one and name it here",
        ],
        id="ledger and tracking store in one database",
    ),
    pytest.param(
        "name: digits\ntask: {name: x, data: 'pg://u:geheim@h', n: .nan}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        [
            "s.yaml:2:23: task.data: the address holds credentials; a spec is stored and tracked unencrypted; let the task read them from the environment",
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


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_the_whole_message(text: str, expected: list[str]) -> None:
    assert refusal(text) == expected


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
            "-s trials=[1: '[' is opened here and not closed properly (expected ',' or ']', but got '<stream end>'); every bracket and quote must be closed; close it",
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
            "-s tracking.uri=http://[hidden]@host: tracking.uri: the address holds credentials; a spec is stored and tracked unencrypted; leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
        ],
        id="59 credentials",
    ),
    pytest.param(
        ["task.api_key=geheim"],
        [
            "-s task.api_key=[hidden]: task.api_key: api_key looks like a secret; a spec is stored and tracked unencrypted; let the task read it from the environment, or give it another name",
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


@pytest.mark.parametrize(("overrides", "expected"), OVERRIDES)
def test_the_whole_message_of_a_wrong_override(overrides: list[str], expected: list[str]) -> None:
    assert refusal(HEAD, *overrides) == expected


def test_options_are_named_as_the_place(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_spec(path, name="../x", tracking_uri="http://user:geheim@host")
    assert str(caught.value).split("\n") == [
        "--name ../x: name: '../x' holds a path separator; a name becomes a directory of that name below the root; use --root to choose another place",
        "--tracking-uri http://[hidden]@host: tracking.uri: the address holds credentials; a spec is stored and tracked unencrypted; leave them out and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
    ]
