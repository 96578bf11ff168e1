"""The points that the trials of a search have used, and the nearest point that none has used.

A point that was trained is not trained again: with the same code and data it would mostly repeat
what is known. What must not live here: samplers, and which trials belong to the search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial

from sweeps.ledger.attributes import is_of_search
from sweeps.spec.search_space import PointKey, SearchSpace
from sweeps.spec.space import Choice, Distribution

_MOST_COMPARED = 20_000
"""Of a space with more points, some near the given one and random ones are compared."""
_DRAWS = 64
_CLOSE = 0.05
"""So far on each side of a point, as a share of each range, points near it are drawn."""


class TriedPoints:
    """The points that trials have used."""

    def __init__(
        self, space: SearchSpace, point_of: Callable[[FrozenTrial], Mapping[str, Any] | None]
    ) -> None:
        self._space, self._point_of = space, point_of
        self._keys: dict[int, PointKey] = {}
        self._used: set[PointKey] = set()
        self._num_read = 0

    def read(self, trials: Sequence[FrozenTrial]) -> None:
        """Add the points of the trials that were created since the last call."""
        for trial in trials[self._num_read :]:
            if is_of_search(trial.user_attrs) and (point := self._point_of(trial)) is not None:
                self._keys[trial.number] = self._space.point_key(point)
                self._used.add(self._keys[trial.number])
        self._num_read = len(trials)

    def contains(self, point: Mapping[str, Any]) -> bool:
        """Return whether a trial has used a point, or one that is the same to a training."""
        return self._space.point_key(point) in self._used

    def keys(self, but: int | None = None) -> set[PointKey]:
        """Return the used points."""
        if but not in self._keys:
            return self._used
        return {key for number, key in self._keys.items() if number != but}

    def nearest_unused(
        self, point: Mapping[str, Any], known: Mapping[str, Any], seed: int
    ) -> dict[str, Any] | None:
        """Return the point nearest to a given one that no trial has used, if there is one."""
        candidates = self._candidates(point, known, seed)
        unused = (one for one in candidates if not self.contains(one))
        return min(unused, key=lambda one: self._space.distance(point, one), default=None)

    def _candidates(
        self, point: Mapping[str, Any], known: Mapping[str, Any], seed: int
    ) -> Iterator[dict[str, Any]]:
        size = self._space.num_points(_MOST_COMPARED + 1)
        if size is not None and size <= _MOST_COMPARED:
            for one in self._space.grid():
                if all(one.get(key, value) == value for key, value in known.items()):
                    yield one
            return
        generator = random.Random(seed)

        def value(key: str, distribution: Distribution) -> Any:
            if key in known or key not in point or isinstance(distribution, Choice):
                return point.get(key, distribution.at(generator.random()))
            at = distribution.position(point[key]) + generator.uniform(-_CLOSE, _NEAR)
            return distribution.at(min(max(at, 0.0), math.nextafter(1.0, 0.0)))

        near = (self._space.point(value) for _ in range(_DRAWS))
        yield from filter(self._space.allows, near)
        drawn = (self._space.draw(seed + index, known) for index in range(_DRAWS))
        yield from (one for one in drawn if one is not None)
