"""One table: what was measured, against what, how far it spreads, and whether the goal is met.

A ratio is taken of two measurements next to each other in time, several times over, and its median
stands in the table with the lowest and the highest. What must not live here: what is measured.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

REPEATS = 7
smoke = False
"""Whether it is only to be shown that rows run: small sizes, and figures that mean nothing."""
Sample = Callable[[], float]


@dataclass(frozen=True)
class Goal:
    """What a measurement must not exceed: the ratio to the peer, or our own value."""

    of: Literal["ratio", "ours"]
    at_most: float

    def __str__(self) -> str:
        return f"{self.of} <= {self.at_most:g}"


@dataclass(frozen=True)
class Result:
    """One line of the table.

    Attributes:
        row: What was measured.
        ours: Median of our measurements; NaN when nothing was measured.
        peer: Median of the peer's; None where there is none.
        unit: Of both.
        ratios: Ours divided by the peer's, one for each repeat.
        goal: None for what is only worth knowing.
    """

    row: str
    ours: float
    peer: float | None
    unit: str
    ratios: tuple[float, ...] = ()
    goal: Goal | None = None

    @property
    def ratio(self) -> float | None:
        """The median of the ratios, which is not the ratio of the medians."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        value = self.ratio if self.goal.of == "ratio" else self.ours
        assert value is not None, f"{self.row}: a goal for a ratio needs a peer"
        return value <= self.goal.at_most


def interleave(
    row: str,
    ours: Sample,
    peers: dict[str, Sample],
    *,
    unit: str,
    goals: dict[str, Goal] | None = None,
    repeats: int = REPEATS,
) -> list[Result]:
    """Measure ours and each peer in turn, `repeats` times over.

    Args:
        row: The row's name; each peer's own is appended.
        ours: Takes one measurement of ours.
        peers: Takes one of each peer's.
        unit: Of what they return.
        goals: By peer.
        repeats: How often; at least 5, or the spread says nothing.
    """
    assert repeats >= 5 or smoke, "fewer than five repeats say nothing about the spread"
    sides: dict[str, Sample] = {"": ours, **peers}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for repeat in range(repeats):
        shift = repeat % len(names)  # nobody is always the first after the others warmed up
        for name in names[shift:] + names[:shift]:
            taken[name].append(sides[name]())
    return [
        paired(f"{row} / {name}", taken[""], taken[name], unit, (goals or {}).get(name))
        for name in peers
    ]


def size(full: int, small: int) -> int:
    """Return how much of something a row takes: `small` for a smoke test."""
    return small if smoke else full


def paired(
    row: str, ours: Sequence[float], peer: Sequence[float], unit: str, goal: Goal | None = None
) -> Result:
    """Make a line of measurements taken next to each other."""
    ratios = tuple(a / b for a, b in zip(ours, peer, strict=True))
    return Result(row, statistics.median(ours), statistics.median(peer), unit, ratios, goal)


def alone(row: str, ours: Sequence[float], unit: str, goal: Goal | None = None) -> Result:
    """Make a line of measurements that no peer has."""
    return Result(row, statistics.median(ours), None, unit, (), goal)


def not_measured(row: str, why: str) -> Result:
    """Make a line that says why there is none."""
    return Result(f"{row}: not measured, {why}", math.nan, None, "-")


def dump(results: Iterable[Result]) -> str:
    """Return results as one line of JSON, for another process."""
    return json.dumps([asdict(result) for result in results])


def load(text: str) -> list[Result]:
    """Return the results that `dump` wrote."""
    return [
        Result(
            **{
                **entry,
                "ratios": tuple(entry["ratios"]),
                "goal": entry["goal"] and Goal(**entry["goal"]),
            }
        )
        for entry in json.loads(text)
    ]


def render(results: Iterable[Result]) -> str:
    """Return the table as text."""
    head = ("row", "ours", "peer", "unit", "ratio", "spread", "goal", "met?")
    lines = [head, *map(_cells, results)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    ruled = [lines[0], tuple("-" * width for width in widths), *lines[1:]]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in ruled
    )


def _cells(result: Result) -> tuple[str, ...]:
    return (
        result.row,
        "-" if math.isnan(result.ours) else f"{result.ours:.4g}",
        "-" if result.peer is None else f"{result.peer:.4g}",
        result.unit,
        "-" if result.ratio is None else f"{result.ratio:.3f}",
        f"{min(result.ratios):.3f}-{max(result.ratios):.3f}" if result.ratios else "-",
        "-" if result.goal is None else str(result.goal),
        {None: "-", True: "yes", False: "NO"}[result.met],
    )
