"""The reasons with which trials are stopped by a request or with their sweep, by no stopping rule.

What must not live here: the kinds of failures (`failure_kinds`), and stopping trials (`driver`).
"""

from __future__ import annotations

BY_THE_SWEEP = "stopped with the sweep: "
"""The beginning of a trial's reason if the trial was pruned because its sweep stopped."""
BY_THE_USER = "stopped by the user"
"""The reason in the ledger of a trial that the user stopped."""
BY_ANOTHER_REQUEST = "ended by another request"
"""The start of the reason of an extra trial that a later request does not need."""


def is_by_request(reason: str | None) -> bool:
    """Return whether a trial with this reason was stopped whatever its values were."""
    return (reason or "").startswith((BY_THE_SWEEP, BY_THE_USER, BY_ANOTHER_REQUEST))
