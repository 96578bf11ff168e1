"""What a driver is asked to train besides the search: see `ExtraTraining`.

What must not live here: which trials are taken (`finishing`, `retrying`, `confirmation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sweeps.reconcile.confirmation import ConfirmOptions
from sweeps.reconcile.retrying import RetryRequest


@dataclass(frozen=True, kw_only=True)
class ExtraTraining:
    """What a user asks a driver to train besides the search."""

    finish: Sequence[int] = ()
    """Numbers of pruned trials to train to their end; each gets a new trial."""
    confirm: ConfirmOptions | None = None
    """Confirm the leaders, and run nothing else; None: confirm none."""
    retry: RetryRequest | None = None
    """Which failed trials become unfinished again; None: none."""


NO_EXTRA = ExtraTraining()
