"""Messages of commands that change something or check before."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.cli import messages
from sweeps.errors import NO_SUCCESS
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.reconcile.failure_policy import Failure, RepeatedFailure
from sweeps.trust.findings import Finding, Findings
from sweeps.view.outcome import SweepFailure, SweepOutcome, find_failure
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


def test_end_of_a_sweep_offers_to_finish_its_pruned_best(tmp_path: Path) -> None:
    pruned = TrialSummary(number=4, state="pruned", params={}, value=0.1, reason="asha")
    for can_finish in (True, False):
        out = io.StringIO()
        outcome = SweepOutcome(
            exit_code=0,
            best=[pruned],
            num_trials=6,
            metrics=["val/loss"],
            max_trials=6,
            can_finish=can_finish,
        )
        messages.outcome(
            Console(file=out), Console(file=io.StringIO()), outcome, SweepPaths(tmp_path, "small")
        )
        assert ("resume small 4 --finish" in out.getvalue()) is can_finish


def _said(outcome: SweepOutcome, root: Path) -> str:
    err = io.StringIO()
    messages.outcome(
        Console(file=io.StringIO()), Console(file=err), outcome, SweepPaths(root, "small")
    )
    return err.getvalue()
