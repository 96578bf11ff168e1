"""What a ledger keeps of the failed attempts at a trial that was run again.

What must not live here: which trials may be run again (`reconcile.retrying`), and the
transaction that reopens one (`ledger`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from redaction.escapes import printable

FAILED_ATTEMPTS = "failed_attempts"
"""A trial attribute: the failures after which the trial was run again, the earliest first."""
REOPENED = "reopened"
"""A trial attribute: what is still to be done before a reopened trial may train; null: nothing."""


class FailedAttempt(NamedTuple):
    """A failure of a trial that was run again."""

    attempt: int
    """The number of the attempt that failed."""
    reason: str
    epoch: int
    """Reports that it had made."""
    ended_ms: int | None
    """When its end was recorded, in milliseconds since the Unix epoch."""
    continued_at: int
    """The report from whose checkpoint the next attempt continued; 0: it began again."""
    changes: str
    """The change of code and configuration before the next attempt; empty: none was seen."""

    @property
    def sentence(self) -> str:
        """The failure, and how the trial was run again."""
        began = f"again from report {self.continued_at}" if self.continued_at else "begun again"
        changed = self.changes or "no change of code or configuration"
        return f"attempt {self.attempt} failed: {self.reason} ({began}; {changed})"


class Reopened(NamedTuple):
    """What a driver does before a reopened trial may train; repeating it does no harm."""

    fresh: bool
    """Remove the trial's files."""
    replaces_run: bool
    """Record the trial in a new run: the old one has points of what is trained again."""


def failed_attempts_in(attributes: Mapping[str, Any]) -> tuple[FailedAttempt, ...]:
    """Return the failed attempts in a trial's attributes."""
    found = (FailedAttempt(*one) for one in attributes.get(FAILED_ATTEMPTS, ()))
    return tuple(
        one._replace(reason=printable(str(one.reason)), changes=printable(str(one.changes)))
        for one in found
    )


def reopened_in(attributes: Mapping[str, Any]) -> Reopened | None:
    """Return what is still to be done for a reopened trial; None: nothing."""
    found = attributes.get(REOPENED)
    return None if found is None else Reopened(*found)
