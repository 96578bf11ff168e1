"""A sweep whose leaders are confirmed without training: the test gives each run its value."""

from __future__ import annotations

from collections.abc import Callable

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import Ending, TrialRecord
from sweeps.reconcile.extra_training import SeriesAdder, read_series
from sweeps.run.session import open_ledger
from sweeps.trust.confirm import Confirmation, ConfirmLeaders, ConfirmRequest, stored_request
from tests.unit.sweeps.sweep_factory import MadeSweep, prepared

Value = Callable[[int, int], float | None]
"""Returns the value of a leader under a seed; None: that run fails."""
SECONDS = {0: 60.0, 1: 30.0}
"""For how long a run of a leader trained."""


def request(made: MadeSweep, **options: float | bool) -> ConfirmRequest:
    """Open the sweep as `sweep confirm` does, and return what the ledger stores."""
    asked = ConfirmLeaders(**options)  # type: ignore[arg-type]  # the caller knows the types
    made.ledger = open_ledger(prepared(made.paths, made.spec, extra=asked), print)
    return stored(made.ledger)


def stored(ledger: Ledger) -> ConfirmRequest:
    """Return the request that a ledger stores."""
    found = stored_request(read_series(ledger.series))
    assert found is not None
    return found


def found(made: MadeSweep) -> Confirmation:
    """Return how far the confirmation is, read anew."""
    ledger = Ledger.open(made.paths.ledger)
    return stored(ledger).follow(ledger.trials())


def add(made: MadeSweep) -> list[TrialRecord]:
    """Add the runs that are needed next, as a driver that has just begun."""
    adding = SeriesAdder(made.ledger, ends=lambda: 0, flush=lambda: None, fence=lambda: None)
    return adding()


def run(made: MadeSweep, value: Value, *, most: int = 100) -> list[tuple[int, int]]:
    """Run a confirmation with a new driver for each run; return leaders and seeds in order."""
    done: list[tuple[int, int]] = []
    while len(done) < most:
        add(made)
        waiting = [t for t in made.ledger.trials() if t.role == "confirm" and not t.finished]
        if not waiting:
            break
        end(made, waiting[0], value)
        assert waiting[0].origin is not None
        assert waiting[0].seed_index is not None
        done.append((waiting[0].origin, waiting[0].seed_index))
    return done


def end(made: MadeSweep, trial: TrialRecord, value: Value) -> None:
    """End a run with its value."""
    assert trial.origin is not None
    assert trial.seed_index is not None
    reached = value(trial.origin, trial.seed_index)
    ending: Ending = "failed" if reached is None else "complete"
    if reached is not None:
        made.ledger.report(trial.number, epoch=10, step=100, value=reached)
    made.ledger.finish(
        trial.number,
        ending,
        reason="ValueError: x" if reached is None else None,
        seconds=SECONDS.get(trial.origin, 45.0),
    )
