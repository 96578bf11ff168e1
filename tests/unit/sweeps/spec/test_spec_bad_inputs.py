# ruff: noqa: E501, because a spec stands on one line
"""Every invalid field of a spec is refused; the messages are in `tests/golden/messages`."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.errors import SpecError
from sweeps.spec.spec import load_spec
from tests.golden.messages import compare_messages
from tests.unit.sweeps.spec_errors import HEAD, refusal

CASES = [
    pytest.param(
        HEAD + "notify: {webhook: https://hooks.example/canary}\n",
        id="webhook whose address is in the spec",
    ),
    pytest.param(
        HEAD + "notify: https://hooks.example/canary\n",
        id="webhook that is no section",
    ),
    pytest.param(
        HEAD + "notify: {webhook: [https://hooks.example/canary]}\n",
        id="webhook that is a list",
    ),
    pytest.param(
        HEAD + "notify: {webhook: '${HOOK}'}\n",
        id="webhook whose variable is not named like a secret",
    ),
    pytest.param(
        HEAD + "notify: {webhook: 'https://${HOST_WEBHOOK}/canary'}\n",
        id="webhook whose variable is a part of the address",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {lr: 0}}\n",
        id="24 lr of zero",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {lr: 1e400}}\nstop: {hours: .inf}\n",
        id="24 what is above 0 and no number",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {betas: [-0.1, 1]}}\n",
        id="decay rates that are none",
    ),
    pytest.param(
        HEAD + "resources: {cpu: 1.0e-5, gpu: 1.0e-5}\n",
        id="shares that Ray does not count",
    ),
    pytest.param(
        HEAD + "train: {schedule: {warmup: 1.0}}\n",
        id="25 warmup of 1.0",
    ),
    pytest.param(
        HEAD + "train: {schedule: {warmup: -0.1}}\n",
        id="25 negative warmup",
    ),
    pytest.param(
        HEAD + "train: {clip: {max_norm: 0}}\n",
        id="27 max_norm of zero",
    ),
    pytest.param(
        HEAD + "train: {clip: {max_norm: -1}}\n",
        id="27 negative max_norm",
    ),
    pytest.param(
        HEAD + "train: {accumulation: 0}\n",
        id="28 accumulation of zero",
    ),
    pytest.param(
        HEAD + "train: {accumulation: 1.5}\n",
        id="28 accumulation of 1.5",
    ),
    pytest.param(
        HEAD + "train: {batch_size: 4, accumulation: 8}\n",
        id="29 micro-batch not whole",
    ),
    pytest.param(
        HEAD + "train: {precision: bf-16}\n",
        id="30 unknown precision",
    ),
    pytest.param(
        HEAD + "train: {optimizer: {name: admw}}\n",
        id="31 misspelt optimizer, whose defaults cannot be known",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 0\n",
        id="32 no trials",
    ),
    pytest.param(
        HEAD + "concurrency: 0\n",
        id="33 no concurrency",
    ),
    pytest.param(
        HEAD + "resources: {gpu: 1.5}\n",
        id="35 gpu of 1.5",
    ),
    pytest.param(
        HEAD + "resources: {gpu: -1}\n",
        id="36 negative gpu",
    ),
    pytest.param(
        HEAD + "resources: {cpu: 0, gpu: lots}\n",
        id="36 gpu by a word, no cpu",
    ),
    pytest.param(
        HEAD + "resources: {workers: 0, placement: alone}\n",
        id="no workers, placed by another word",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: val/loss\nmode: minimize\ntrials: 24\n",
        id="39 mode by another word",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: [val/loss, 5, '']\nmode: [min, maxx, {a: 1}]\ntrials: 24\n",
        id="several metrics, wrong ones",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: [val/loss]\nmode: []\ntrials: 24\n",
        id="lists of fewer than two",
    ),
    pytest.param(
        "name: digits\ntask: digits\nmetric: [val/loss, val/loss, val/accuracy]\nmode: [min, max]\ntrials: 24\nsearch: {sampler: cmaes}\nearly_stopping: {scheduler: median}\nstop: {hours: 1, value: 0.1, plateau: {trials: 3}}\n",
        id="several metrics, and what takes one",
    ),
    pytest.param(
        "name: ../x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 path in a name",
    ),
    pytest.param(
        "name: a\\b\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 backslash",
    ),
    pytest.param(
        "name: ''\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 empty name",
    ),
    pytest.param(
        HEAD.replace("digits", "x" * 300, 1),
        id="49 long name",
    ),
    pytest.param(
        "name: -x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 leading dash",
    ),
    pytest.param(
        "name: a..b\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 two dots",
    ),
    pytest.param(
        'name: "a\\nb"\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n',
        id="49 line break",
    ),
    pytest.param(
        "name: mlartifacts\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 reserved",
    ),
    pytest.param(
        "name: 5\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="49 number",
    ),
    pytest.param(
        HEAD.replace("val/loss", "x" * 300),
        id="50 metric too long",
    ),
    pytest.param(
        HEAD.replace("task: digits", "task: {name: a, data: " + "x" * 6001 + "}"),
        id="50 argument too long",
    ),
    pytest.param(
        HEAD.replace("task: digits", "task: {name: a, " + "k" * 246 + ": 1}"),
        id="50 key too long",
    ),
    pytest.param(
        HEAD + "checkpoint: {every: 0 epochs}\n",
        id="51 interval of zero",
    ),
    pytest.param(
        HEAD + "failures: {max_retries: -2}\n",
        id="52 negative retries",
    ),
    pytest.param(
        HEAD + "early_stopping: {grace_epochs: 10}\n",
        id="55 grace of all epochs",
    ),
    pytest.param(
        HEAD + "early_stopping: {}\nbudget: {epochs: 1}\n",
        id="55 one epoch",
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: asha_promote, grace_epochs: 10}\n",
        id="55 grace of all epochs, with pauses",
    ),
    *(
        pytest.param(HEAD + f"budget: {budget}\n" + more, id=name)
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
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: median, grace_epochs: 12, min_trials: 0}\n",
        id="55 grace beyond all epochs",
    ),
    pytest.param(
        HEAD
        + "early_stopping: {scheduler: pbt, interval_epochs: 10, quantile: 0.6, exempt: 0.1}\n",
        id="pbt: nobody to compare, nothing to change",
    ),
    pytest.param(
        HEAD.replace("trials: 24", "trials: 1")
        + "space:\n  train.batch_size: {choice: [32, 64]}\nearly_stopping: {scheduler: pb2}\n",
        id="pb2: one member, and steps that differ",
    ),
    pytest.param(
        HEAD + "early_stopping: {scheduler: genetic, brackets: 3}\n",
        id="a scheduler that there is not",
    ),
    pytest.param(
        HEAD + "stop: {hours: 2h, value: low, plateau: {trials: 0}}\n",
        id="stops that are none",
    ),
    pytest.param(
        HEAD + "stop: {hours: 0, value: .nan, plateau: 20}\n",
        id="a stop at once",
    ),
    pytest.param(
        HEAD + "stop: {time_budget_s: 60, plateau: {min_delta: 0.1}}\n",
        id="a plateau of no trials",
    ),
    pytest.param(
        HEAD + "version: 2\nnew_thing: 3\n",
        id="60 newer version",
    ),
    pytest.param(
        HEAD + "version: 0\n",
        id="60 version of zero",
    ),
    pytest.param(
        HEAD + "tracking: {uri: 'http://user:geheim@host'}\n",
        id="credentials in tracking.uri",
    ),
    pytest.param(
        HEAD + "storage: {ledger: 'postgresql://ada:geheim@host/sweeps'}\n",
        id="a ledger in a database",
    ),
    pytest.param(
        HEAD + "storage: {checkpoints: 's3://ada:geheim@bucket/sweeps'}\n",
        id="credentials in storage.checkpoints",
    ),
    pytest.param(
        HEAD + "storage: {checkpoints: '/mnt/checkpoints'}\n",
        id="storage.checkpoints in a directory",
    ),
    pytest.param(
        HEAD + "storage: {checkpoints: 's3://bucket/a/../b'}\n",
        id="storage.checkpoints with a step upwards",
    ),
    pytest.param(
        HEAD
        + "space: {train.optimizer.lr: {uniform: [0.1, 1]}}\n"
        + "early_stopping: {scheduler: pbt}\n"
        + "storage: {checkpoints: 's3://bucket/sweeps'}\n",
        id="a population in an object store",
    ),
    pytest.param(
        "name: digits\ntask: {name: x, data: 'pg://u:geheim@h', n: .nan}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="credentials in an argument",
    ),
    pytest.param(
        "{}\n",
        id="all missing",
    ),
    pytest.param(
        HEAD + "train: 3\nspace: [1]\nbudget:\n",
        id="sections of the wrong kind",
    ),
    pytest.param(
        "name: digits\ntask: {hidden: 3}\nmetric: val/loss\nmode: min\ntrials: 24\n",
        id="task without a name",
    ),
    pytest.param(
        HEAD
        + "train: {clip: {max_norm: 0}, batch_size: 5, accumulation: 2, nope: 1}\nspace: {train.optimizer.lr: {uniform: [0, 1]}}\nbudget: {epochs: 1}\nearly_stopping: {grace_epochs: 2}\n",
        id="all in one pass",
    ),
]


@pytest.mark.parametrize("text", CASES)
def test_invalid_field_is_refused(request: pytest.FixtureRequest, text: str) -> None:
    compare_messages(request, refusal(text))


OVERRIDES = [
    pytest.param(
        ["trials"],
        id="58 no equals sign",
    ),
    pytest.param(
        ["train.optimiser.lr=3"],
        id="59 misspelt path",
    ),
    pytest.param(
        ["trials.x=3"],
        id="59 below a value",
    ),
    pytest.param(
        ["trials=[1"],
        id="59 not YAML",
    ),
    pytest.param(
        ["trials=0"],
        id="59 wrong value",
    ),
    pytest.param(
        ["train.batch_size=${BATCH}"],
        id="59 unset variable",
    ),
    pytest.param(
        ["mode=max", "trials", "seed=-1"],
        id="59 several",
    ),
    pytest.param(
        ["tracking.uri=http://user:geheim@host"],
        id="59 credentials",
    ),
    pytest.param(
        ["task.api_key=geheim"],
        id="59 secret",
    ),
    pytest.param(
        ["space.train.optimizer.lr={uniform: [1, 0]}"],
        id="59 space",
    ),
]


@pytest.mark.parametrize("overrides", OVERRIDES)
def test_invalid_override_is_refused(request: pytest.FixtureRequest, overrides: list[str]) -> None:
    compare_messages(request, refusal(HEAD, *overrides))


def test_options_are_named_as_the_place(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(HEAD)
    with pytest.raises(SpecError) as caught:
        load_spec(path, name="../x", tracking_uri="http://user:geheim@host")
    compare_messages(request, str(caught.value).split("\n"))
