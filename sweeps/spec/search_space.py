"""The search space: all distributions with their conditions and constraints.

A point is a value for every parameter that exists in it. A parameter with a condition exists only
if other parameters have certain values; a constraint forbids points. Whatever may be searched has
a value of the file where it is not. What must not live here: single distributions (`space`), the
syntax of constraints (`constraints`), and sampling (`sweeps.search`).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic.fields import FieldInfo

from sweeps.spec.constraints import Constraint
from sweeps.spec.error_messages import leaves
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.sections import ResourcesConfig
from sweeps.spec.space import Distribution
from sweeps.spec.trial_run import flatten
from trainable.config import TaskConfig, TrainConfig

MOST_DRAWS = 10_000
"""One of so many random points must satisfy the constraints."""
MOST_GRID_POINTS = 1_000_000
"""The most points of a grid that are tried, from its first."""
PointKey = frozenset[tuple[str, Any]]
"""Identifies a point: equal for points that are the same to a training."""
UNFIT = ("train.batch_size", "train.loader.drop_last", WORKERS)
"""Parameters that a population cannot search: trials that differ in them take different steps."""


@dataclass(frozen=True)
class SearchSpace:
    """Distributions by key, with their conditions, and constraints on points.

    Every condition names a `choice` of the same space, and there are no circles.
    """

    distributions: Mapping[str, Distribution]
    constraints: Sequence[Constraint] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that constraints name and that are not searched."""

    def ordered(self, first: Sequence[str] = ()) -> list[tuple[str, Distribution]]:
        """Return the parameters in the order of the spec, each after those it depends on."""
        found: dict[str, Distribution] = {}

        def add(key: str) -> None:
            for other, _ in self.distributions[key].when:
                add(other)
            found.setdefault(key, self.distributions[key])

        for key in (*first, *self.distributions):
            add(key)
        return list(found.items())

    @property
    def conditional(self) -> bool:
        """Whether a parameter has a condition, so that points have different parameters."""
        return any(one.when for one in self.distributions.values())

    def unconditional(self) -> dict[str, Distribution]:
        """Return the parameters that every point has."""
        return {key: one for key, one in self.distributions.items() if not one.when}

    def point(
        self, value: Callable[[str, Distribution], Any], first: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Return the point in which `value`, in the order of `ordered`, chooses each parameter."""
        found: dict[str, Any] = {}
        for key, distribution in self.ordered(first):
            if distribution.exists(found):
                found[key] = value(key, distribution)
        return found

    def allows(self, point: Mapping[str, Any]) -> bool:
        """Return whether a point satisfies all constraints."""
        values = {**self.fixed, **point}
        return all(constraint.holds(values) for constraint in self.constraints)

    def may_allow(
        self, others: Sequence[Mapping[str, Any]] = ()
    ) -> Callable[[Mapping[str, Any]], bool]:
        """Return whether a point with some of its values may satisfy all constraints.

        If values that constraints name are missing, some other point that has them must have
        values that go with the given ones.
        """
        named = {key for one in self.constraints for key in one.keys}
        needed = set(named)
        for key, one in reversed(self.ordered()):
            if key in needed:
                needed.update(name for name, _ in one.when)
        ordered = [(key, one) for key, one in self.ordered() if key in needed]

        def pick(values: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
            found: dict[str, Any] = {}
            is_whole = True
            for key, one in ordered:
                if one.exists(found):
                    if key in values:
                        found[key] = one.normalize(values[key])
                    elif key in named:
                        is_whole = False
            return found, is_whole

        def may_be(some: Mapping[str, Any]) -> bool:
            point, is_whole = pick(some)
            is_allowed = self.allows(point)
            if is_whole or not is_allowed:
                return is_allowed
            picked = (pick({**one, **some}) for one in others)
            allowed = [self.allows(point) for point, is_whole in picked if is_whole]
            return any(allowed) or not allowed

        return may_be

    def project(self, values: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the point of this space with these values; None if they are outside.

        Values of parameters that do not exist in the point are left out.
        """
        found: dict[str, Any] = {}
        for key, distribution in self.ordered():
            if distribution.exists(found):
                if key not in values or not distribution.contains(values[key]):
                    return None
                found[key] = distribution.normalize(values[key])
        return found if self.allows(found) else None

    def draw(
        self, seed: int, known: Mapping[str, Any] | None = None, *, attempts: int = MOST_DRAWS
    ) -> dict[str, Any] | None:
        """Return the first allowed point of a random sequence; None if there is none."""
        generator = random.Random(seed)
        given = known or {}

        def value(key: str, distribution: Distribution) -> Any:
            share = generator.random()
            return distribution.normalize(given[key]) if key in given else distribution.at(share)

        for _ in range(attempts):
            if self.allows(point := self.point(value)):
                return point
        return None

    def grid(self) -> Iterator[dict[str, Any]]:
        """Yield the allowed points in nested loops: the last parameter varies fastest.

        Distributions must be finite; only the first million points, allowed or not, are looked at.
        """
        points = itertools.islice(self._nested(self.ordered(), {}), MOST_GRID_POINTS)
        return filter(self.allows, points)

    def num_points(self, most: int) -> int | None:
        """Return the number of points; None if there is no end of them.

        With conditions or constraints the points are counted one by one, up to `most`.
        """
        numbers = [one.num_values() for one in self.distributions.values()]
        if None in numbers or not numbers:  # trials of an empty space differ in their seeds
            return None
        if self.conditional or self.constraints:
            return sum(1 for _ in itertools.islice(self.grid(), most))
        return math.prod(one.num_values() or 0 for one in self.distributions.values())

    def point_key(self, point: Mapping[str, Any]) -> PointKey:
        """Return a key that is equal for points that are the same to a training."""
        return frozenset((k, self.distributions[k].identity(v)) for k, v in point.items())

    def distance(self, one: Mapping[str, Any], other: Mapping[str, Any]) -> float:
        """Return how far two points are from each other.

        The sum over their parameters, from 0 to 1 each; a parameter that only one of them has
        counts 1.
        """
        both = one.keys() & other.keys()
        apart = len(one.keys() ^ other.keys())
        return apart + sum(self.distributions[k].distance(one[k], other[k]) for k in both)

    def digest(self) -> str:
        """Return a digest that is equal for spaces with the same distributions.

        A prior is not part of it: what a sampler has stored stays valid with another one.
        """
        spaces = sorted(self.distributions.items())
        data = {key: replace(one, prior=None).to_data() for key, one in spaces}
        return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:16]

    def _nested(
        self, rest: Sequence[tuple[str, Distribution]], point: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        if not rest:
            yield point
            return
        key, distribution = rest[0]
        if not distribution.exists(point):
            yield from self._nested(rest[1:], point)
            return
        for value in distribution.all_values() or ():
            yield from self._nested(rest[1:], {**point, key: value})


def mutable(space: SearchSpace) -> list[str]:
    """Return the parameters that a member of a population may change while it trains, sorted.

    All others, and those on which others depend, are copied from the donor.
    """
    named = {key for one in space.distributions.values() for key, _ in one.when}
    return sorted(
        key
        for key in space.distributions.keys() - named
        if key.startswith(("train.optimizer.", "train.clip.")) and key != "train.optimizer.name"
    )


def searchable_fields() -> dict[str, FieldInfo]:
    """Return the fields that may be searched, by dotted key; arguments may be searched, too."""
    fields = {f"train.{name}": info for name, info in leaves(TrainConfig).items()}
    return fields | {WORKERS: leaves(ResourcesConfig)["workers"]}


def fixed_values(
    train: TrainConfig,
    task: TaskConfig,
    resources: ResourcesConfig,
    *,
    own_optimizer: bool = False,
) -> dict[str, Any]:
    """Return the value of everything that may be searched, by dotted key."""
    data = train.model_dump(mode="json")
    if own_optimizer:
        data["optimizer"] = train.optimizer.model_dump(mode="json", exclude_unset=True)
    # A written section lacks these keys at their default.
    left_out = {key: info.default for key, info in searchable_fields().items() if info.exclude_if}
    arguments = {f"task.{key}": value for key, value in task.model_dump(mode="json").items()}
    written = dict(flatten(data, "train."))
    return {**left_out, **written, **arguments, WORKERS: resources.workers}
