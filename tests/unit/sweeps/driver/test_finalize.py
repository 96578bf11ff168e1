"""The end of an attempt: its exit code, and the sweep's run."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sweeps.driver import finalize
from sweeps.driver.finalize import finalize_attempt
from sweeps.driver.session import SweepSession
from sweeps.policies.failure_policy import Failure, RepeatedFailureDetector
from sweeps.publishing.figure_worker import FigureWorkerPool
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.recorder import MemoryRecorder


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
    monkeypatch: pytest.MonkeyPatch,
    complete: int,
    trials: int,
    status: str,
    code: int,
) -> None:
    monkeypatch.setattr(finalize, "_publish_report", lambda *_: None)  # takes seconds
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
        recorder,
    )
    made.ledger.note_attempt({})
    with FigureWorkerPool(made.spec, made.paths, [], recorder) as gallery:
        outcome = finalize_attempt(sweep, gallery, uninterrupted, same.abort_reason)
    assert (outcome.exit_code, recorder.runs[None].status) == (code, status)
    if code:
        assert "failed in the same way: ValueError: x (task.py:3)" in str(outcome.cause)
    else:
        assert recorder.runs[None].tags["best_trial"] == "0"
        assert made.view.ledger.concluded == trials
        assert made.view.outcome().exit_code == 0


class Watched:
    """A gallery that tells when it was asked for what."""

    def __init__(self, age: float) -> None:
        self.age = age
        self.asked: list[Any] = []

    def flush_now(self, ranked: list[int]) -> None:
        self.asked.append(("flush_now", ranked))

    def finish(self, timeout: float, ranked: list[int]) -> int:
        self.asked.append(("finish", timeout, ranked))
        return 0

    def pictures(self, number: int) -> list[Path]:
        self.asked.append(("pictures", number))
        return []


@pytest.mark.parametrize(("age", "patience"), [(9.0, 2.0), (60.0, 6.0), (3600.0, 15.0)])
@pytest.mark.parametrize("metric", ["val/loss", "[val/loss, val/accuracy]"])
def test_end_waits_for_figures_a_tenth_of_the_sweeps_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: str, age: float, patience: float
) -> None:
    several = metric.startswith("[")
    made = MadeSweep(tmp_path, metric=metric, mode="[min, max]" if several else "min")
    for value in (0.5, 0.3, 0.4):
        made.add("complete", (value, 0.9) if several else value)
    made.ledger.note_attempt({})
    gallery, recorder = Watched(age), Delivered()
    asked: list[Any] = gallery.asked

    def export(*_: object) -> list[Path]:
        time.sleep(0.1)
        asked.append("weights")
        return []

    def report(_: object, target: Path) -> Path:
        time.sleep(0.2)
        asked.append("report")
        target.write_text("page")
        return target

    monkeypatch.setattr(finalize, "export_trial", export)
    uninterrupted: Any = SimpleNamespace(requested=False, exit_code=0)
    sweep = SweepSession(made.paths, made.spec, made.ledger, recorder, recorder)  # type: ignore[arg-type]
    finalize_attempt(sweep, gallery, uninterrupted, None, report)  # type: ignore[arg-type]
    best = [1] if several else [1, 1, 2, 0]
    rest = ["report"] if several else ["weights", "report"]
    after = [] if several else [("pictures", 1)]
    assert asked == [("flush_now", best), *rest, ("finish", patience, best), *after]
    assert recorder.runs[None].artifacts["report.html"] == b"page"
