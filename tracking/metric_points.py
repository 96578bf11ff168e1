"""Metric points, and the rule by which each (run, key, step) is recorded at most once.

A run that resumes from a checkpoint logs the steps after it a second time. `HighWaterMarks` keeps
the highest step of each key and drops points at or below it: the first value stays. What must not
live here: storage and transport.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
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
MAX_PART = MAX_POINTS // 10


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


class PackedRow(NamedTuple):
    """A row of the queue: only points that were not recorded before."""

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

    def filter_new(self, rows: Iterable[MetricRow]) -> list[PackedRow]:
        """Return the points of `rows` above the marks, and raise the marks to them."""
        steps = self.steps
        admitted: list[PackedRow] = []
        for row in rows:
            step = int(row.step)
            fresh: dict[str, float] = {}
            for name, number in row.metrics.items():
                key = clean_key(name)
                if step <= steps.get(key, -1):
                    continue
                value = float(number)
                if math.isinf(value):
                    counter = clean_key(INFINITE_PREFIX + key)
                    if step <= steps.get(counter, -1):
                        continue
                    self.num_infinite[counter] = self.num_infinite.get(counter, 0) + 1
                    fresh[counter] = float(self.num_infinite[counter])
                    steps[counter] = step
                else:
                    fresh[key] = value
                steps[key] = step
            if fresh:
                admitted.append(PackedRow(step, int(row.timestamp_ms), fresh))
        return admitted

    def merge_max(self, other: HighWaterMarks) -> None:
        """Raise each mark to that of `other` where the other is higher."""
        for key, step in other.steps.items():
            self.steps[key] = max(step, self.steps.get(key, step))
        for key, count in other.num_infinite.items():
            self.num_infinite[key] = max(count, self.num_infinite.get(key, count))


def pack(rows: Iterable[PackedRow]) -> bytes:
    """Return rows in the queue's binary form. JSON took half of the time of an append.

    First comes a line of JSON: for each series of rows with equal keys, the keys and the number of
    rows. Then come all steps, all times and all values, eight bytes each.
    """
    names: list[list[str]] = []
    counts: list[int] = []
    steps, times, values = array("q"), array("q"), array("d")
    for row in rows:
        keys = list(row.metrics)
        if not names or names[-1] != keys:
            names.append(keys)
            counts.append(0)
        counts[-1] += 1
        steps.append(row.step)
        times.append(row.timestamp_ms)
        values.extend(row.metrics.values())
    head = json.dumps([names, counts])
    return b"".join((head.encode(), b"\n", steps, times, values))


def unpack(packed: bytes) -> list[Point]:
    """Return the points of packed rows, in their order."""
    head, _, body = packed.partition(b"\n")
    names, counts = json.loads(head)
    size = 8 * sum(counts)
    steps, times, values = array("q"), array("q"), array("d")
    steps.frombytes(body[:size])
    times.frombytes(body[size : 2 * size])
    values.frombytes(body[2 * size :])
    names_of_rows = chain.from_iterable(map(repeat, names, counts))
    value = iter(values)
    return [
        Point(key, next(value), step, time)
        for keys, step, time in zip(names_of_rows, steps, times, strict=True)
        for key in keys
    ]


def parts(rows: Iterable[PackedRow]) -> Iterator[tuple[list[PackedRow], int]]:
    """Split rows into lists of at most 100 points, each with its number of points.

    Ten such lists fill a request, whose cost depends little on the number of its points.
    """
    part: list[PackedRow] = []
    num_points = 0
    for row in rows:
        items = list(row.metrics.items())
        while items:
            taken, items = items[: MAX_PART - num_points], items[MAX_PART - num_points :]
            part.append(
                row if len(taken) == len(row.metrics) else row._replace(metrics=dict(taken))
            )
            num_points += len(taken)
            if num_points == MAX_PART:
                yield part, num_points
                part, num_points = [], 0
    if part:
        yield part, num_points


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
