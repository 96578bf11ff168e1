"""What `sweep confirm` was asked for, as the ledger stores it.

A resume decides by the ledger alone which trials a confirmation still needs. What must not live
here: that decision (`reconcile.confirmation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

CONFIRM = "confirm"
"""A study attribute: the last request; see `ConfirmRequest`."""


@dataclass(frozen=True, kw_only=True)
class ConfirmRequest:
    """A request to train the leaders again under common seeds."""

    leaders: tuple[int, ...]
    """The numbers of the trials to confirm, the best first."""
    seeds: int
    """Under how many seeds each leader is trained at most."""
    until: float
    """The probability of being the best at which the race ends."""
    split: bool
    """Whether each seed has its own split of the data."""
    training: str
    """A digest of what the spec says about training; see `reconcile.confirmation`."""
    counted_from: int
    """The first trial whose result counts: earlier ones trained with another configuration."""
    failures_from: int
    """The first trial whose failure counts: what failed for an earlier request is tried again."""

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | None) -> ConfirmRequest | None:
        """Return the stored request; None without one."""
        if data is None:
            return None
        return cls(**{**data, "leaders": tuple(map(int, data["leaders"]))})

    def to_data(self) -> dict[str, Any]:
        """Return the request as plain data."""
        return {**asdict(self), "leaders": list(self.leaders)}
