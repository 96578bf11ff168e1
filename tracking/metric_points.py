"""Metric points, and the rule by which each (run, key, step) is recorded at most once.

A run that resumes from a checkpoint logs the steps after it a second time. `HighWaterMarks` keeps
the highest step of each key and drops points at or below it: the first value stays. What must not
live here: storage and transport.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from tracking.limits import (
    MAX_PAIRS,
    MAX_POINTS,
    MAX_REQUEST_BYTES,
    clean_key,
    num_bytes_sent,
    split_pairs,
)

INFINITE_PREFIX = "num_infinite/"


class MetricRow(Protocol):
    """The metrics logged at one step; any object with these three attributes."""

    @property
    def step(self) -> int:
        """Optimizer steps completed."""
        ...

    @property
    def timestamp_ms(self) -> int:
        """The time, in milliseconds since the Unix epoch."""
        ...

    @property
    def metrics(self) -> Mapping[str, float]:
        """The values, by metric name."""
        ...


class Point(NamedTuple):
    """One value of one metric."""

    key: str
    value: float
    step: int
    timestamp_ms: int


class PointRow(NamedTuple):
    """The metrics logged at one step."""

    step: int
    timestamp_ms: int
    metrics: dict[str, float]


@dataclass
class HighWaterMarks:
    """The highest recorded step of each key of one run.

    An infinite value is not recorded, because it would break the scale of every chart; the metric
    `num_infinite/<key>` counts such values. NaN is recorded as it is.
    """

    steps: dict[str, int] = field(default_factory=dict)
    num_infinite: dict[str, int] = field(default_factory=dict)
    are_complete: bool = True
    """False: the server may hold points above the marks, so each new point must be compared."""

    def copy(self) -> HighWaterMarks:
        """Return an independent copy."""
        return HighWaterMarks(dict(self.steps), dict(self.num_infinite), self.are_complete)

    def filter_new(self, rows: Iterable[MetricRow]) -> list[Point]:
        """Return the points of `rows` above the marks, and raise the marks to them."""
        steps = self.steps
        new: list[Point] = []
        for row in rows:
            step, time_ms = int(row.step), int(row.timestamp_ms)
            for name, number in row.metrics.items():
                key = clean_key(name)
                if step <= steps.get(key, -1):
                    continue
                value = float(number)
                if math.isinf(value):
                    counter = clean_key(INFINITE_PREFIX + key)
                    if step <= steps.get(counter, -1):
                        continue
                    count = self.num_infinite[counter] = self.num_infinite.get(counter, 0) + 1
                    new.append(Point(counter, float(count), step, time_ms))
                    steps[counter] = step
                else:
                    new.append(Point(key, value, step, time_ms))
                steps[key] = step
        return new

    def covers(self, other: HighWaterMarks) -> bool:
        """Return whether no mark of `other` is higher."""
        return all(step <= self.steps.get(key, -1) for key, step in other.steps.items())

    def merge_max(self, other: HighWaterMarks) -> None:
        """Raise each mark to that of `other` where the other is higher."""
        for key, step in other.steps.items():
            self.steps[key] = max(step, self.steps.get(key, step))
        for key, count in other.num_infinite.items():
            self.num_infinite[key] = max(count, self.num_infinite.get(key, count))


class Request(NamedTuple):
    """Parameters that the run does not have yet, points and tags, to write to one run."""

    params: Mapping[str, str]
    points: Sequence[Point]
    tags: Mapping[str, str]

    def split(self) -> Iterator[Request]:
        """Split into as few requests as a server accepts: parameters, then points, then tags."""
        params, points, tags = self
        pairs = [*params.items(), *tags.items()]
        if not (pairs or points):
            return
        if (
            len(points) + len(pairs) <= MAX_POINTS
            and max(len(params), len(tags)) <= MAX_PAIRS
            and sum(num_bytes_sent(*pair) for pair in pairs) <= MAX_REQUEST_BYTES // 2
        ):
            yield self
            return
        for part in split_pairs(params):
            yield Request(part, (), {})
        for first in range(0, len(points), MAX_POINTS):
            yield Request({}, points[first : first + MAX_POINTS], {})
        for part in split_pairs(tags):
            yield Request({}, (), part)
