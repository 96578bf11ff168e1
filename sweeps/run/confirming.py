"""Add the trials of a confirmation to the ledger, seed by seed.

What must not live here: which trials a confirmation needs (`reconcile.confirmation`).
"""

from __future__ import annotations

from collections.abc import Callable

from sweeps.ledger.confirm_request import ConfirmRequest
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reasons import BY_ANOTHER_REQUEST
from sweeps.ledger.trials import TrialRecord
from sweeps.reconcile.confirmation import follow, superseded, without_open


class ConfirmingTrials:
    """Adds the trials of the next seed when those of the seed before have ended."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        ends: Callable[[], int],
        flush: Callable[[], object],
        fence: Callable[[], None],
    ) -> None:
        self._ledger, self._request = ledger, ledger.confirm_request
        self._ends, self._flush, self._fence = ends, flush, fence
        self._num_ends: int | None = None

    def __call__(self) -> list[TrialRecord]:
        """Add the trials that are needed next, and return them."""
        # Only the end of a trial calls for others, and reading thousands of them takes long.
        if self._request is None or self._num_ends == (ends := self._ends()):
            return []
        self._flush()
        self._num_ends = ends
        trials = self._ledger.trials()
        request = self._request
        needed = follow(request, trials, minimize=self._ledger.minimize).needed
        if not needed:  # for good: the runs that decided it have ended
            self._request = None
        missing = without_open(needed, request, trials)
        if not missing:
            return []
        self._fence()
        return add_runs(self._ledger, missing, request)


def add_runs(
    ledger: Ledger, runs: list[tuple[int, int]], request: ConfirmRequest
) -> list[TrialRecord]:
    """Add a trial for each leader and seed, in one transaction."""
    return ledger.transaction(
        lambda: [
            ledger.add_extra("confirm", leader, seed, split=request.split) for leader, seed in runs
        ]
    )


def start_confirmation(ledger: Ledger, request: ConfirmRequest) -> None:
    """Store a request, and end the runs of an earlier one that this one does not need."""

    def store() -> None:
        for number in superseded(request, ledger.trials(), minimize=ledger.minimize):
            ledger.finish(number, "pruned", reason=BY_ANOTHER_REQUEST)
        if request != ledger.confirm_request:
            ledger.store_confirm_request(request)

    ledger.transaction(store)
