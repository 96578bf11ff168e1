"""The section `repeats`: with how many seeds each configuration trains, and what its value is.

What must not live here: the arithmetic (`sweeps.statistics.over_seeds`), and which trials are the
seeds of one configuration (`sweeps.ledger.over_seeds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from sweeps.errors import UserError
from sweeps.formatting import shown
from sweeps.statistics.over_seeds import SeedValue, combine
from trainable.config import Section


class RepeatsConfig(Section):
    """With how many seeds each configuration trains; `repeats: 3` is short for `{seeds: 3}`."""

    seeds: int = Field(default=1, ge=1, examples=[3])
    """Trainings of each configuration. All configurations have the same seeds, so that they are
    compared on the same initial weights and order of samples. 1: each trial has its own seed."""
    value: SeedValue = "mean"
    """What the value of a configuration is: the mean or the median of the values of its seeds."""

    def combine(self, values: Sequence[float]) -> float:
        """Return one number for the values of a configuration's seeds; at least one is needed."""
        return combine(values, self.value)


def is_off(repeats: RepeatsConfig) -> bool:
    """Return whether the section says nothing; a spec is then written without it."""
    return repeats == RepeatsConfig()


def from_short_form(value: object) -> Any:
    """Return the section that a number of seeds stands for; other values unchanged."""
    if isinstance(value, dict | RepeatsConfig):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        text = shown(value) if not isinstance(value, list) else "a list"
        raise UserError(
            f"{text} is no number of seeds; write for example 3, or {{seeds: 3, value: median}}"
        )
    return {"seeds": value}
