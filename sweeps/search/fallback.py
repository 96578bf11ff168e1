"""When the sampler GP gives way to a random point: where its model has nothing to say.

GP trusts its model. On equal values the model is empty, and GP suggests few points again and
again. Around the optimum of its model it suggests neighbours of known points, also where the model
is wrong, as with learning curves that cross. What must not live here: the model
(`gaussian_process`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from sweeps.config.search_space import SearchSpace

_NEAR = 0.01
"""A point is near another if no parameter is further away than this share of its range."""


def tells_nothing(shown: Sequence[FrozenTrial]) -> bool:
    """Return whether all complete trials, of at least two, have the same values."""
    values = {tuple(trial.values) for trial in shown if trial.state == TrialState.COMPLETE}
    return len(values) == 1 and sum(trial.state == TrialState.COMPLETE for trial in shown) > 1


def is_known(point: Mapping[str, Any], shown: Sequence[FrozenTrial], space: SearchSpace) -> bool:
    """Return whether a suggestion is near the point of a trial, so that a random one is better.

    Args:
        point: The suggestion.
        shown: The trials so far, as points of the space; one outside has no parameters.
        space: The search space.
    """
    return any(_is_near(point, one.params, space) for one in shown)


def _is_near(one: Mapping[str, Any], other: Mapping[str, Any], space: SearchSpace) -> bool:
    return one.keys() == other.keys() and all(
        space.distributions[key].distance(value, other[key]) <= _NEAR for key, value in one.items()
    )
