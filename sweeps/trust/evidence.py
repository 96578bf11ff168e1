"""What the trials of a sweep say, in numbers: bad regions, bounds, and noise.

What must not live here: sentences (`findings`, the cards of `audit`), changes of the space
(`next_search`), what mattered (`importance`), and drawing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

from sweeps.formatting import format_value
from sweeps.spec.space import (
    Choice,
    Distribution,
    Int,
    LogInt,
    LogUniform,
    QUniform,
    Uniform,
    is_number,
)
from sweeps.statistics.proportions import hypergeometric_tail
from sweeps.view.sweep_view import SweepView

_FEWEST = 5
"""A bad region has at least so many trials."""
_CHANCE = 0.05
"""The probability that chance alone would show a bad region anywhere in the space."""
_LEADERS = 3
_NEAR, _WITH_LEADERS = 0.1, 0.2
"""The parts of a range that are near its end: for the best trial, and for all leaders."""
_MOST_BEYOND = 2
"""The most trials between the best trial and the end of the range."""
Side = Literal["below", "above", "equal"]
Params = Mapping[int, Mapping[str, Any]]


class Region(NamedTuple):
    """A part of the range of one parameter."""

    key: str
    side: Side
    value: Any
    """The first value beyond the region; of a `choice`, the option itself."""
    trials: frozenset[int]
    """The numbers of the trials in the region."""

    def words(self, name: str) -> str:
        """Return the region in words, with the name of the parameter."""
        side = "" if self.side == "equal" else f" {self.side}"
        return f"{name}{side} {format_value(self.value)}"

    def contains(self, value: Any) -> bool:
        """Return whether a value of the parameter lies in the region."""
        if self.side == "equal":
            return repr(value) == repr(self.value)
        return bool(value < self.value if self.side == "below" else value > self.value)


class NearBound(NamedTuple):
    """A parameter of which the best trials are near one end of the searched range."""

    key: str
    side: Side
    bound: float
    value: float
    """The value of the best trial."""
    num_leaders: int


def bad_regions(space: Mapping[str, Distribution], params: Params, bad: Set[int]) -> list[Region]:
    """Return the largest region of each parameter in which every trial ended badly.

    The least likely by chance comes first. Only those that chance would show anywhere in the space
    in fewer than one of twenty sweeps.
    """
    tested = [region for key in space for region in _candidates(key, space[key], params, bad)]
    found = []
    for region in tested:
        having = {number for number in params if region.key in params[number]}
        size = len(region.trials)
        chance = hypergeometric_tail(size, size, len(having & bad), len(having))
        if size >= _FEWEST and chance * len(tested) < _CHANCE:
            found.append((chance, region))
    return [region for _, region in sorted(found, key=lambda item: item[0])]


def _candidates(
    key: str, distribution: Distribution, params: Params, bad: Set[int]
) -> Iterator[Region]:
    points = values_of(key, params)
    if isinstance(distribution, Choice):
        for one in by_option(key, distribution, points):
            yield one if one.trials <= bad else one._replace(trials=frozenset())
        return
    good = [value for number, value in points if number not in bad and is_number(value)]
    if not good:
        return
    low, high = min(good), max(good)
    yield Region(key, "below", low, frozenset(n for n, value in points if value < low))
    yield Region(key, "above", high, frozenset(n for n, value in points if value > high))


def values_of(key: str, params: Params) -> list[tuple[int, Any]]:
    """Return the trials that have a parameter, each with its value."""
    return [(number, point[key]) for number, point in params.items() if key in point]


def by_option(key: str, choice: Choice, points: Sequence[tuple[int, Any]]) -> Iterator[Region]:
    """Yield the region of each option of a choice."""
    for option in choice.options:
        mine = frozenset(number for number, value in points if repr(value) == repr(option))
        yield Region(key, "equal", option, mine)


def near_bounds(
    space: Mapping[str, Distribution],
    params: Params,
    leaders: Sequence[Mapping[str, Any]],
) -> list[NearBound]:
    """Return the parameters of which the best trials are near an end of the searched range.

    `leaders` are the parameters of these trials, the best first.
    """
    best = leaders[:_LEADERS]
    if len(best) < _LEADERS:
        return []
    found = []
    for key, distribution in space.items():
        values = [value for one in best if is_number(value := one.get(key))]
        known = [at for value in values if (at := place(distribution, value)) is not None]
        if len(known) < len(best):
            continue
        tried = [value for point in params.values() if is_number(value := point.get(key))]
        low, high = ends(distribution)
        if known[0] <= _NEAR and max(known) <= _WITH_LEADERS:
            side: Side = "below"
            end, beyond = low, sum(value < values[0] for value in tried)
        elif known[0] >= 1 - _NEAR and min(known) >= 1 - _WITH_LEADERS:
            side, end, beyond = "above", high, sum(value > values[0] for value in tried)
        else:
            continue
        if beyond <= _MOST_BEYOND:
            found.append(NearBound(key, side, end, values[0], len(best)))
    return found


def scale(distribution: Distribution) -> Callable[[float], float]:
    """Return the function that maps a number to the scale on which a range is searched."""
    return math.log if isinstance(distribution, LogUniform | LogInt) else float


def place(distribution: Distribution, value: object) -> float | None:
    """Return where in its range a value lies, from 0 to 1; None if there is no such place."""
    if not isinstance(distribution, Uniform | LogUniform | QUniform | Int):
        return None
    low, high = ends(distribution)
    if not is_number(value) or not low <= value <= high or low == high:
        return None
    scaled = scale(distribution)
    return (scaled(value) - scaled(low)) / (scaled(high) - scaled(low))


def ends(distribution: Distribution) -> tuple[float, float]:
    """Return the ends of a range."""
    low, high, *_ = distribution.arguments()
    return low, high


_LEVEL = 0.05


def seed_values(view: SweepView) -> Mapping[int, Mapping[int, float]]:
    """Return the values under several seeds, by the search's trial and the common seed."""
    found: dict[int, dict[int, float]] = {}
    # Extra trials and repeats have common seeds of their own: never the same.
    for record in view.records:
        value = record.own_value
        if record.role not in ("search", "repeat") or record.seed_index is None or value is None:
            continue
        if record.state == "complete":
            found.setdefault(record.search_number, {})[2 * record.seed_index] = value
    # of extra trials, those that the last series compares
    if view.series_result is not None:
        for number, values in view.series_result.compared.items():
            again = {2 * index + 1: value for index, value in enumerate(values)}
            found.setdefault(number, {}).update(again)
    return found


def chance_difference(view: SweepView) -> float | None:
    """Return the difference that seeds alone make of two equal configurations, or less.

    It is exceeded in 5 of 100 pairs. The difference of two values, each the mean over the seeds
    of the search, has the variance `2 sd**2 / seeds`. None if no configuration was trained under
    several seeds.
    """
    from sweeps.statistics.common_seeds import half_width, noise_floor, table_of  # slow to import

    values = seed_values(view)
    floor = noise_floor(table_of(values)) if values else None
    if floor is None:
        return None
    error = floor.sd * math.sqrt(2 / view.spec.repeats.seeds)
    return half_width(error, floor.freedom, _LEVEL)
