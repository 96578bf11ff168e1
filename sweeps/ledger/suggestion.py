"""A proposal: what the ledger's next trial gets. What must not live here: making one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.distributions import BaseDistribution


@dataclass(frozen=True)
class Suggestion:
    """A point of a search space."""

    params: Mapping[str, Any]
    distributions: Mapping[str, BaseDistribution]
    """What each parameter was drawn from."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler wants to find again: the trial's system attributes."""
