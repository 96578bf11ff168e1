"""How a sweep ends: exit code, cause, and the command that continues."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import sqlite3
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli import messages
from sweeps.cli.app import app
from sweeps.cli.run_console import report_error
from sweeps.engine import local_ray
from sweeps.engine.resources import Machine
from sweeps.errors import HELD, NO_SUCCESS, WRONG_INPUT, LedgerBusy, LedgerError, LockLost
from sweeps.ledger.attributes import LACKS_MODEL
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.failure_policy import Failure, RepeatedFailure
from sweeps.spec.spec import trial_yaml
from sweeps.spec.trial_run import TrialSeed
from sweeps.sweep_lock import lock_lost
from sweeps.trust.findings import Finding, Findings
from sweeps.view.outcome import SweepFailure, SweepOutcome, find_failure
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox_file import OutboxError
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import ConfigError


def test_sweep_at_its_limit_suggests_no_more_trials(tmp_path: Path) -> None:
    failed = SweepOutcome(
        exit_code=NO_SUCCESS, num_trials=4, max_trials=4, failure=SweepFailure("none")
    )
    for outcome, last in (
        (failed, "run FILE --name NAME --root .*\n"),
        (replace(failed, num_left=1), "resume small --root .*\n"),
        (replace(failed, max_trials=8), "resume small -s trials=8 --root .*\n"),
    ):
        assert re.search(f"{last}$", _said(outcome, tmp_path)), _said(outcome, tmp_path)


@pytest.mark.parametrize(("key", "is_new"), [("metric", True), ("train.batch_size", False)])
def test_fixed_settings_need_a_new_sweep(tmp_path: Path, key: str, is_new: bool) -> None:
    error = ConfigError("'val/los' is not reported; write val/loss", key=key)
    failure = Failure(error.kind, f"{error.kind}: {error}", "", "loop.py:358")
    ended = TrialSummary(number=0, state="failed", params={}, value=None, reason=failure.reason)
    for cause in (find_failure([ended]).cause, RepeatedFailure((0, 1, 2), failure).cause):
        for left in (0, 3):
            said = _said(
                SweepOutcome(
                    exit_code=NO_SUCCESS,
                    num_trials=6,
                    num_left=left,
                    max_trials=12,
                    failure=SweepFailure(cause),
                ),
                tmp_path,
            )
            last = ", then start a new sweep with:\n.* run FILE --name NAME --root .*\n$"
            assert bool(re.search(last, said)) is is_new, said


@pytest.mark.parametrize(
    ("kind", "num_retryable", "last"),
    [
        ("error", 2, "resume small --retry --root"),
        ("non_finite", 2, "resume small --root"),
        ("storage", 2, "resume small --root"),
        ("error", 0, "resume small --root"),
    ],
)
def test_failed_sweep_offers_what_may_help(
    tmp_path: Path, kind: str, num_retryable: int, last: str
) -> None:
    outcome = SweepOutcome(
        exit_code=NO_SUCCESS,
        num_trials=4,
        num_left=1,
        num_retryable=num_retryable,
        failure=SweepFailure("trial 0 failed", 0, kind),
    )
    assert last in _said(outcome, tmp_path).splitlines()[-1]


def test_end_of_a_run_states_what_was_found(tmp_path: Path) -> None:
    best = TrialSummary(number=3, state="complete", params={}, value=0.5)
    outcome = SweepOutcome(
        exit_code=0, best=[best], num_trials=8, metrics=["val/loss"], max_trials=16
    )
    for overrides, command in (
        (("trials=16",), "try more: .* -s trials=16 --root"),
        (
            ("trials=16", "space.a={int: [1, 4]}"),
            r"-s trials=16 -s 'space.a=\{int: \[1, 4\]\}' --",
        ),
    ):
        findings = Findings([Finding("best", "One."), Finding("epochs", "Two.")], overrides)
        out = io.StringIO()
        console, paths = Console(file=out, width=500), SweepPaths(tmp_path, "small")
        messages.outcome(console, console, outcome, paths, findings)
        lines = out.getvalue().splitlines()
        assert lines[1:3] == ["- One.", "- Two."]
        assert re.search(command, lines[-1]), lines[-1]


@pytest.mark.parametrize(
    ("code", "kind", "change"),
    [(NO_SUCCESS, "storage", "free space"), (130, "hang", "failures.step_timeout")],
)
def test_aborted_sweep_says_what_to_change(
    tmp_path: Path, code: int, kind: str, change: str
) -> None:
    cause = f"trial 2 failed: {kind}: x"
    aborted = SweepOutcome(
        exit_code=code,
        num_trials=4,
        num_left=2,
        failure=SweepFailure(cause, 2, kind, is_aborted=True),
    )
    said = _said(aborted, tmp_path).splitlines()
    assert said[0] == f"stopped: {cause}"
    assert change in said[-2]
    assert " resume small " in said[-1]


def _said(outcome: SweepOutcome, root: Path) -> str:
    err = io.StringIO()
    messages.outcome(
        Console(file=io.StringIO()), Console(file=err), outcome, SweepPaths(root, "small")
    )
    return err.getvalue()


def _end(error: LedgerError | LockLost | OSError, paths: SweepPaths) -> tuple[int, list[str]]:
    said = io.StringIO()
    code = report_error(error, paths, Console(file=said, width=20))
    return code, said.getvalue().splitlines()


@pytest.fixture
def paths(tmp_path: Path) -> SweepPaths:
    made = SweepPaths(tmp_path, "digits")
    made.directory.mkdir()
    return made


def _failures(paths: SweepPaths) -> list[LedgerError | OSError]:
    """A storage that fails under the ledger, the outbox and any other file of a sweep."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(paths.trial(0) / "config.yaml"))
    return [
        LedgerFile(paths.ledger).refusal(sqlite3.OperationalError("database or disk is full")),
        LedgerFile(paths.ledger).refusal(
            sqlite3.OperationalError("attempt to write a readonly database")
        ),
        OutboxError(f"the outbox {paths.outbox} cannot be used: 7 bytes are free; is untouched"),
        full,
    ]


def test_storage_failure_stops_a_sweep(paths: SweepPaths) -> None:
    paths.spec.touch()
    for error in _failures(paths):
        code, lines = _end(error, paths)
        assert code == NO_SUCCESS
        assert len(lines) == 3
        assert lines[0].startswith("stopped: ")
        for part in (str(paths.directory), "bytes are free", "untouched"):
            assert part in lines[0]
        assert lines[-1].endswith(f"resume digits --root {paths.root}")


def test_storage_failure_at_creation_refuses_the_sweep(paths: SweepPaths) -> None:
    for error in _failures(paths):
        assert _end(error, paths) == (WRONG_INPUT, [str(error)])


def test_damaged_ledger_is_left_to_the_user(paths: SweepPaths) -> None:
    paths.spec.touch()
    damaged = LedgerFile(paths.ledger).refusal(sqlite3.DatabaseError("file is not a database"))
    code, lines = _end(damaged, paths)
    assert (code, lines[0]) == (WRONG_INPUT, str(damaged))


def test_locked_ledger_is_reported(paths: SweepPaths) -> None:
    paths.spec.touch()
    lost = lock_lost("the lock was replaced", paths.directory)
    for error in (LedgerBusy(paths.ledger, 30.0), lost):
        code, lines = _end(error, paths)
        assert (code, lines[0]) == (HELD, str(error))


def test_ray_that_fails_to_start_ends_with_a_message(
    paths: SweepPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    # Other tests of this process may share a Ray, which is none of this one's business.
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    paths.spec.touch()
    token = uuid.uuid4().hex
    with pytest.raises(local_ray.NoRay) as late:
        local_ray.start(token, Machine("test", cpus=1, memory=2**30, gpus=()), concurrency=1)
    local_ray.stop(token)
    code, lines = _end(late.value, paths)
    assert code == NO_SUCCESS
    assert lines[0].startswith("stopped: Ray could not be started: The current node timed out")
    assert lines[-1].endswith(f"resume digits --root {paths.root}")


def test_resume_never_chooses_again(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path)
    before = made.paths.spec.read_bytes()
    done = CliRunner().invoke(
        app, ["resume", "small", "--root", str(tmp_path), "-s", "trials=40", "-s", "search=auto"]
    )
    assert done.exit_code == WRONG_INPUT
    assert "auto" in done.output
    assert made.paths.spec.read_bytes() == before


MODEL = {"model": {"weight": torch.ones(2)}}
TWO = {"metric": "[val/loss, val/error]", "mode": "[min, min]"}
_NOT_RUN = {"ui", "report", "resume"}
"""They serve, draw or train: only their arguments are read."""


@pytest.mark.parametrize(
    ("state", "metrics"),
    [
        pytest.param(MODEL, {}, id="task"),
        pytest.param({"loop": MODEL}, TWO, id="custom loop, two metrics"),
        pytest.param({"loop": {"epoch": 1}}, {}, id="no model"),
        pytest.param({"loop": {"epoch": 1}}, TWO, id="no model, two metrics"),
        pytest.param(None, {}, id="no checkpoint"),
        pytest.param(None, TWO, id="no checkpoint, two metrics"),
    ],
)
def test_suggested_commands_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: dict[str, Any] | None,
    metrics: dict[str, str],
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = MadeSweep(tmp_path / "a b", **metrics)
    for values in ([0.5, 0.1], [0.4, 0.2]):
        number = sweep.add(None, values if metrics else values[0])
        directory = sweep.paths.trial(number)
        directory.mkdir(parents=True)
        config = sweep.spec.trial_config(TrialSeed("trial", number), {})
        (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
        if state is not None:
            _save(directory, state, value=values[0])
        if state == {"loop": {"epoch": 1}}:
            sweep.ledger.set_attr(number, LACKS_MODEL, True)
        sweep.ledger.finish(number, "complete")
    commands = _suggested(sweep)
    exports = [words for words in commands if "--export" in words]
    has_model = state is not None and "model" in state.get("loop", state)
    assert bool(exports) is has_model
    for words in [*commands, *([["best", "small", "--root", str(tmp_path / "a b")]] * 2)]:
        chosen = {"TRIAL": "1", "DIR": str(tmp_path / "exported")}
        given = [chosen.get(word, word) for word in words]
        help_only = ["--help"] * (words[0] in _NOT_RUN)
        done = CliRunner().invoke(app, [*given, *help_only])
        assert done.exit_code == 0, f"{given}: {done.output}"
        assert ("--export" in done.output) <= (has_model or bool(help_only))
    assert (tmp_path / "exported/model.safetensors").exists() is has_model
    best = CliRunner().invoke(app, ["best", "small", "--root", str(tmp_path / "a b"), "--json"])
    found = json.loads(best.stdout)
    for one in found if metrics else [found]:
        assert (one["best_checkpoint"] is not None) is (state is not None)


def _save(directory: Path, state: dict[str, Any], *, value: float) -> None:
    config = CheckpointConfig.model_validate({"every": "1 epoch"})
    store = CheckpointStore(directory, config, metric="val/loss")
    store.save(lambda: state, step=10, reports=1, value=value)
    store.close()


def _suggested(sweep: MadeSweep) -> list[list[str]]:
    """Return the words of each command in the last lines of a sweep, without the program."""
    said = io.StringIO()
    console = Console(file=said, width=500)
    messages.outcome(console, console, sweep.view.outcome(), sweep.paths)
    lines = [line.partition(": sweep ")[2] for line in said.getvalue().splitlines()]
    return [shlex.split(line) for line in lines if line]
