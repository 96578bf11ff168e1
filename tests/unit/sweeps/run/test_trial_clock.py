"""For how long workers have trained a trial."""

from __future__ import annotations

from sweeps.run.worker_watch import TrialClock


def test_time_without_a_worker_does_not_count() -> None:
    now = 100.0
    clock = TrialClock(lambda: now)
    assert clock.seconds(3) is None, "no worker trained it"
    clock.start(3)
    now += 5
    assert clock.seconds(3) == 5
    clock.stop(3)
    now += 60  # it waits at a rung
    clock.stop(3)
    assert clock.seconds(3) == 5
    clock.start(3, before=1.0)
    now += 2
    assert clock.seconds(3) == 7, "what this driver counted is newer than the ledger"


def test_time_of_earlier_drivers_counts() -> None:
    now = 0.0
    clock = TrialClock(lambda: now)
    clock.start(0, before=12.5)
    now += 1
    assert clock.seconds(0) == 13.5
    clock.start(0)  # its worker was lost and replaced
    assert clock.seconds(0) == 13.5
