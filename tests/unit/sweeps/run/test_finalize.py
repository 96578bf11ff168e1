"""The end of an attempt: its exit code, and the sweep's run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.ledger.reader import LedgerReader
from sweeps.reconcile.failure_policy import Failure, RepeatedFailureDetector
from sweeps.run.finalize import finalize_attempt
from sweeps.run.session import SweepSession
from tests.memory_recorder import MemoryRecorder
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep


class Delivered(MemoryRecorder):
    """In which everything has arrived at once."""

    silence = 0.0

    def flush(self, timeout: float) -> int:
        del timeout
        return 0

    close = flush


@pytest.mark.parametrize(
    ("complete", "trials", "status", "code"),
    [
        (2, 5, "FINISHED", 0),
        (2, 6, "FAILED", 3),  # one is saved from the same failure
        (0, 3, "FAILED", 3),
    ],
)
def test_repeated_failure_fails_sweep_unless_it_is_complete(
    tmp_path: Path,
    complete: int,
    trials: int,
    status: str,
    code: int,
) -> None:
    made, same = MadeSweep(tmp_path), RepeatedFailureDetector(3)
    for _ in range(complete):
        made.add("complete", 0.5)
    for _ in range(3):
        number = made.add("failed", 0.7, reason="ValueError: x")
        same.failed(number, Failure("error", "ValueError: x", "", "task.py:3"))
    recorder: Any = Delivered()
    uninterrupted: Any = SimpleNamespace(requested=False, exit_code=0)
    sweep = SweepSession(
        made.paths,
        with_overrides(made.spec, [f"trials={trials}"]),
        made.ledger,
        recorder,
        lambda: None,
    )
    made.ledger.add_attempt({})
    outcome = finalize_attempt(sweep, uninterrupted, same.abort_reason)
    failure = outcome.failure
    assert (failure is not None and failure.is_aborted) is bool(code)
    assert (outcome.exit_code, recorder.runs[None].status) == (code, status)
    if failure is not None:
        assert "failed in the same way: ValueError: x (task.py:3)" in failure.cause
        abort = made.ledger.abort
        assert abort is not None
        assert (abort.key, abort.why) == ("failures.same_failure_limit", failure.cause)
        assert made.ledger.abort == LedgerReader(made.paths.ledger).abort
        made.ledger.add_attempt({})
        assert made.ledger.abort is None, "the next driver has not stopped itself"
    else:
        assert recorder.runs[None].tags["best_trial"] == "0"
        assert made.view.ledger.num_published == trials
        assert made.view.outcome().exit_code == 0
