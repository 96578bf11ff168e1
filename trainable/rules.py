"""The training rules: what a run of each version of them does otherwise than one of another.

A run is resumed under the rules with which it was begun, so that an upgrade changes no training
that has started. A new rule is a new number and a new field here; whoever is concerned asks the
field. What must not live here: what the rules are about.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

EARLIEST: Final = 1
"""The rules of runs that do not say under which they were begun."""
NEWEST: Final = 2
BUILT = "built.json"
"""In a run's directory: a summary of what its task built when it was begun (`built`)."""


@dataclass(frozen=True)
class Rules:
    """What holds under one version of the rules.

    Attributes:
        shared_data: Task and data are built under the sweep's data seed, and validation draws
            under a fixed one; otherwise both depend on the run's seed.
        groups_by_shape: The default parameter groups hold all parameters, and tensors with fewer
            than two dimensions do not decay; otherwise they hold what has `requires_grad` when
            built, and biases and torch's own norm layers do not decay.
        compares_built: What the task builds is noted with the run and compared when it is resumed.
    """

    shared_data: bool
    groups_by_shape: bool
    compares_built: bool


def rules_of(number: int) -> Rules:
    """Return the rules of a version."""
    since_2 = number >= 2
    return Rules(shared_data=since_2, groups_by_shape=since_2, compares_built=since_2)


_NEWEST_RULES = rules_of(NEWEST)
_CURRENT = ContextVar("training_rules", default=_NEWEST_RULES)


def current_rules() -> Rules:
    """Return the rules of the run that is being built; outside of one, the newest."""
    return _CURRENT.get()


@contextmanager
def under_rules(number: int) -> Iterator[Rules]:
    """Build a run under the rules of a version: what its task calls meanwhile follows them."""
    token = _CURRENT.set(rules_of(number))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)
