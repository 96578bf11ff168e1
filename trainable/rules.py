"""The versions of the training rules, and how each differs from the one before.

A run resumes under the rules with which it started, so that an upgrade does not change a training
in progress. A new rule needs a new number and a new field here; the code that it affects reads the
field. What must not live here: the code that the rules affect.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

EARLIEST: Final = 1
"""The rules of runs that have recorded no version."""
NEWEST: Final = 3
BUILT = "built.json"
"""The file in a run's directory that summarises what its task built at the start (`built.py`)."""


@dataclass(frozen=True)
class Rules:
    """One version of the rules.

    Attributes:
        shared_data: Task and data are built under the sweep's data seed, and validation draws
            random numbers under a fixed seed. If false, both depend on the run's seed.
        groups_by_shape: The default parameter groups have all parameters, without weight decay for
            tensors with fewer than two dimensions. If false, they have the parameters that require
            gradients when built, without weight decay for biases and torch's own norm layers.
        compares_built: A summary of what the task builds is stored with the run, and compared when
            the run resumes.
        readable_layers: The gradient norms of layers are named after the layers' paths and
            classes. If false, after their paths alone.
    """

    shared_data: bool
    groups_by_shape: bool
    compares_built: bool
    readable_layers: bool


def rules_of(number: int) -> Rules:
    """Return the rules of a version."""
    since_2, since_3 = number >= 2, number >= 3
    return Rules(
        shared_data=since_2,
        groups_by_shape=since_2,
        compares_built=since_2,
        readable_layers=since_3,
    )


_NEWEST_RULES = rules_of(NEWEST)
_CURRENT = ContextVar("training_rules", default=_NEWEST_RULES)


def current_rules() -> Rules:
    """Return the rules of the run that is being built; if none is, the newest rules."""
    return _CURRENT.get()


@contextmanager
def under_rules(number: int) -> Iterator[Rules]:
    """Build a run under a version's rules: `current_rules` returns them inside the context."""
    token = _CURRENT.set(rules_of(number))
    try:
        yield _CURRENT.get()
    finally:
        _CURRENT.reset(token)
