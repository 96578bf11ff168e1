# ruff: noqa: E501, because a spec stands on one line
"""Every invalid field of a spec is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.errors import SpecError
from sweeps.spec.spec import load_with_positions
from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

CASES = {
    "webhook whose address is in the spec": HEAD
    + "notify: {webhook: https://hooks.example/canary}\n",
    "webhook that is no section": HEAD + "notify: https://hooks.example/canary\n",
    "webhook that is a list": HEAD + "notify: {webhook: [https://hooks.example/canary]}\n",
    "webhook whose variable is not named like a secret": HEAD + "notify: {webhook: '${HOOK}'}\n",
    "webhook whose variable is a part of the address": HEAD
    + "notify: {webhook: 'https://${HOST_WEBHOOK}/canary'}\n",
    "24 lr of zero": HEAD + "train: {optimizer: {lr: 0}}\n",
    "24 what is above 0 and no number": HEAD
    + "train: {optimizer: {lr: 1e400}}\nstop: {hours: .inf}\n",
    "decay rates that are none": HEAD + "train: {optimizer: {betas: [-0.1, 1]}}\n",
    "shares that Ray does not count": HEAD + "resources: {cpu: 1.0e-5, gpu: 1.0e-5}\n",
    "25 warmup of 1.0": HEAD + "train: {schedule: {warmup: 1.0}}\n",
    "25 negative warmup": HEAD + "train: {schedule: {warmup: -0.1}}\n",
    "27 max_norm of zero": HEAD + "train: {clip: {max_norm: 0}}\n",
    "27 negative max_norm": HEAD + "train: {clip: {max_norm: -1}}\n",
    "28 accumulation of zero": HEAD + "train: {accumulation: 0}\n",
    "28 accumulation of 1.5": HEAD + "train: {accumulation: 1.5}\n",
    "29 micro-batch not whole": HEAD + "train: {batch_size: 4, accumulation: 8}\n",
    "30 unknown precision": HEAD + "train: {precision: bf-16}\n",
    "31 misspelt optimizer, whose defaults cannot be known": HEAD
    + "train: {optimizer: {name: admw}}\n",
    "32 no trials": "name: digits\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 0\n",
    "33 no concurrency": HEAD + "concurrency: 0\n",
    "35 gpu of 1.5": HEAD + "resources: {gpu: 1.5}\n",
    "36 negative gpu": HEAD + "resources: {gpu: -1}\n",
    "36 gpu by a word, no cpu": HEAD + "resources: {cpu: 0, gpu: lots}\n",
    "no workers, placed by another word": HEAD + "resources: {workers: 0, placement: alone}\n",
    "39 mode by another word": "name: digits\ntask: digits\nmetric: val/loss\nmode: minimize\ntrials: 24\n",
    "several metrics, wrong ones": "name: digits\ntask: digits\nmetric: [val/loss, 5, '']\nmode: [min, maxx, {a: 1}]\ntrials: 24\n",
    "lists of fewer than two": "name: digits\ntask: digits\nmetric: [val/loss]\nmode: []\ntrials: 24\n",
    "several metrics, and what takes one": "name: digits\ntask: digits\nmetric: [val/loss, val/loss, val/accuracy]\nmode: [min, max]\ntrials: 24\nsearch: {sampler: cmaes}\nearly_stopping: {scheduler: median}\nstop: {hours: 1, value: 0.1, plateau: {trials: 3}}\n",
    "49 path in a name": "name: ../x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "49 backslash": "name: a\\b\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "49 empty name": "name: ''\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "49 long name": HEAD.replace("digits", "x" * 300, 1),
    "49 leading dash": "name: -x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "49 two dots": "name: a..b\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "49 line break": 'name: "a\\nb"\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n',
    "49 reserved": "name: mlartifacts\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "49 number": "name: 5\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "50 metric too long": HEAD.replace("val/loss", "x" * 300),
    "50 argument too long": HEAD.replace(
        "task: digits", "task: {name: a, data: " + "x" * 6001 + "}"
    ),
    "50 key too long": HEAD.replace("task: digits", "task: {name: a, " + "k" * 246 + ": 1}"),
    "51 interval of zero": HEAD + "checkpoint: {every: 0 epochs}\n",
    "52 notice": HEAD + "preemption: {command: '', every: soon, comand: x}\n",
    "52 interval": HEAD + "preemption: {command: test -e x, every: 0.01}\n",
    "52 negative retries": HEAD + "failures: {max_retries: -2}\n",
    "55 grace of all epochs": HEAD + "early_stopping: {grace_epochs: 10}\n",
    "55 one epoch": HEAD + "early_stopping: {}\nbudget: {epochs: 1}\n",
    "55 grace of all epochs, with pauses": HEAD
    + "early_stopping: {scheduler: asha_promote, grace_epochs: 10}\n",
    **{
        name: HEAD + f"budget: {budget}\n" + more
        for name, budget, more in (
            ("a budget in two units", "{epochs: 3, steps: 100, report_every: 5}", ""),
            ("a budget without a length", "{epochs: null}", ""),
            ("a budget in steps without reports", "{steps: 100}", ""),
            ("reports further apart than the budget", "{steps: 100, report_every: 101}", ""),
            ("a report in the middle of a step", "{samples: 100, report_every: 2.5}", ""),
            ("an interval of evaluations by another name", "{epochs: 3, evaluate_every: 2}", ""),
            (
                "a first rung after the last report",
                "{steps: 100, report_every: 30}",
                "early_stopping: {scheduler: asha, grace_epochs: 4}\n",
            ),
            (
                "a population without a comparison of reports",
                "{steps: 100, report_every: 100}",
                "early_stopping: {scheduler: pbt}\nspace: {train.optimizer.lr: {uniform: [0.1, 1]}}\n",
            ),
            (
                "other samples for each batch size",
                "{samples: 900, report_every: 300, val_batches: 2}",
                "space: {train.batch_size: {choice: [8, 16]}}\n",
            ),
            ("no patience", "{epochs: 3}", "early_stopping: {patience: 0}\n"),
        )
    },
    "55 grace beyond all epochs": HEAD
    + "early_stopping: {scheduler: median, grace_epochs: 12, min_trials: 0}\n",
    "pbt: nobody to compare, nothing to change": HEAD
    + "early_stopping: {scheduler: pbt, interval_epochs: 10, quantile: 0.6, exempt: 0.1}\n",
    "pb2: one member, and steps that differ": HEAD.replace("trials: 24", "trials: 1")
    + "space:\n  train.batch_size: {choice: [32, 64]}\nearly_stopping: {scheduler: pb2}\n",
    "a scheduler that there is not": HEAD + "early_stopping: {scheduler: genetic, brackets: 3}\n",
    "stops that are none": HEAD + "stop: {hours: 2h, value: low, plateau: {trials: 0}}\n",
    "a stop at once": HEAD + "stop: {hours: 0, value: .nan, plateau: 20}\n",
    "a plateau of no trials": HEAD + "stop: {time_budget_s: 60, plateau: {min_delta: 0.1}}\n",
    "60 newer version": HEAD + "version: 2\nnew_thing: 3\n",
    "60 version of zero": HEAD + "version: 0\n",
    "credentials in tracking.uri": HEAD + "tracking: {uri: 'http://user:geheim@host'}\n",
    "a ledger in a database": HEAD + "storage: {ledger: 'postgresql://ada:geheim@host/sweeps'}\n",
    "credentials in storage.checkpoints": HEAD
    + "storage: {checkpoints: 's3://ada:geheim@bucket/sweeps'}\n",
    "storage.checkpoints in a directory": HEAD + "storage: {checkpoints: '/mnt/checkpoints'}\n",
    "storage.checkpoints with a step upwards": HEAD
    + "storage: {checkpoints: 's3://bucket/a/../b'}\n",
    "a population in an object store": HEAD
    + "space: {train.optimizer.lr: {uniform: [0.1, 1]}}\n"
    + "early_stopping: {scheduler: pbt}\n"
    + "storage: {checkpoints: 's3://bucket/sweeps'}\n",
    "credentials in an argument": "name: digits\ntask: {name: x, data: 'pg://u:geheim@h', n: .nan}\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "all missing": "{}\n",
    "sections of the wrong kind": HEAD + "train: 3\nspace: [1]\nbudget:\n",
    "task without a name": "name: digits\ntask: {hidden: 3}\nmetric: val/loss\nmode: min\ntrials: 24\n",
    "all in one pass": HEAD
    + "train: {clip: {max_norm: 0}, batch_size: 5, accumulation: 2, nope: 1}\nspace: {train.optimizer.lr: {uniform: [0, 1]}}\nbudget: {epochs: 1}\nearly_stopping: {grace_epochs: 2}\n",
}


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_invalid_field_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(text))


@pytest.mark.parametrize("text", ["", "{}", CASES["all in one pass"]], ids=["empty", "{}", "all"])
def test_each_command_that_reads_a_spec_says_the_same(text: str) -> None:
    assert refusal(text, commands=["check", "run", "train"])


OVERRIDES = {
    "58 no equals sign": ["trials"],
    "59 misspelt path": ["train.optimiser.lr=3"],
    "59 below a value": ["trials.x=3"],
    "59 not YAML": ["trials=[1"],
    "59 wrong value": ["trials=0"],
    "59 unset variable": ["train.batch_size=${BATCH}"],
    "59 several": ["mode=max", "trials", "seed=-1"],
    "59 credentials": ["tracking.uri=http://user:geheim@host"],
    "59 secret": ["task.api_key=geheim"],
    "59 space": ["space.train.optimizer.lr={uniform: [1, 0]}"],
}


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES.keys())
def test_invalid_override_is_refused(request: pytest.FixtureRequest, overrides: list[str]) -> None:
    compare_messages(request, refusal(HEAD, *overrides))


def test_options_are_named_as_the_place(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_with_positions(path, name="../x", tracking_uri="http://user:geheim@host")[0]
    compare_messages(request, str(caught.value).split("\n"))
