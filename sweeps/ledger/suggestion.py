"""The parameters of the ledger's next trial. What must not live here: suggesting them."""

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
    """The distribution of each parameter."""
    system_attrs: Mapping[str, Any] = field(default_factory=dict)
    """The sampler's own state of this trial, stored as the trial's system attributes."""
    priors: str | None = None
    """The digest of the priors around which it was drawn; None: around none."""
