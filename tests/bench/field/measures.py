"""What the rows of the field say: costs, regrets, ranks and ratios, with 95 % intervals.

A target counts from when a search keeps it: the time since which everything that it shows is good
enough, up to the end of the search. A search that is not there at the end counts with all of its
epochs, which favours it. What must not live here: measuring, and printing (`report.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tests.bench.rows_file import Row

Path = Sequence[tuple[int, float, float]]
"""Epochs, clock and regret, at each time that a search shows another configuration."""

NEAR = 0.01
"""Regret that counts as the best configuration of a table."""
FLOOR, CEILING = 1e-3, 10.0
"""Between which a logarithm is taken: noise, and showing nothing or what diverges."""
_RESAMPLES = 2000
_LEAD_RESAMPLES = 300


def kept_from(path: Path, level: float) -> tuple[int, float] | None:
    """Return epochs and clock since when all that is shown is good enough; None: never."""
    since = None
    for spent, clock, regret in path:
        if regret > level:
            since = None
        elif since is None:
            since = spent, clock
    return since


def regret_at(path: Path, epochs: int) -> float:
    """Return the regret of what is shown after so many epochs; infinite before anything is."""
    left = math.inf
    for spent, _, regret in path:
        if spent > epochs:
            break
        left = regret
    return left


def area(path: Path, budget: int) -> float:
    """Return the mean of the decimal logarithm of regret over all epochs of the budget."""
    ends = [*(min(spent, budget + 1) for spent, _, _ in path[1:]), budget + 1]
    first = path[0][0] if path else budget + 1
    total = (min(first, budget + 1) - 1) * math.log10(CEILING)
    for (spent, _, regret), end in zip(path, ends, strict=False):
        bounded = min(max(regret, FLOOR), CEILING)
        total += max(end - spent, 0) * math.log10(bounded)
    return total / budget


class Ranks(NamedTuple):
    """Mean ranks over problems.

    Attributes:
        mean: By search; 1 is the best.
        critical: Searches whose mean ranks are closer are not told apart.
        p: Of Friedman's test that all are alike.
    """

    mean: dict[str, float]
    critical: float
    p: float


def ranks(values: dict[str, Sequence[float]]) -> Ranks:
    """Rank searches by a value for each problem, less is better.

    J. Demsar, "Statistical comparisons of classifiers over multiple data sets", JMLR 7 (2006):
    Friedman's test, and Nemenyi's critical difference at 5 %.
    """
    table = np.array(list(values.values()))
    count, problems = table.shape
    mean = stats.rankdata(table, axis=0).mean(axis=1)
    p = math.nan
    if count > 2 and problems > 1:
        p = float(stats.friedmanchisquare(*table).pvalue)
    q = float(stats.studentized_range.ppf(0.95, count, np.inf)) / math.sqrt(2)
    critical = q * math.sqrt(count * (count + 1) / (6 * problems))
    return Ranks(dict(zip(values, mean.tolist(), strict=True)), critical, p)


class Ratio(NamedTuple):
    """How many times a peer's cost is that of ours, in the median over problems."""

    middle: float
    low: float
    high: float


def median_ratio(theirs: Sequence[Sequence[float]], ours: Sequence[Sequence[float]]) -> Ratio:
    """Compare costs by problem and replication; the interval resamples the replications."""
    random = np.random.default_rng(0)

    def medians(sides: Sequence[Sequence[float]]) -> Any:
        rows = [np.asarray(side, dtype=float) for side in sides]
        picked = [row[random.integers(len(row), size=(_RESAMPLES, len(row)))] for row in rows]
        return np.array([np.median(one, axis=1) for one in picked])

    middle = np.median([np.median(a) / np.median(b) for a, b in zip(theirs, ours, strict=True)])
    drawn = np.median(medians(theirs) / medians(ours), axis=0)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return Ratio(float(middle), float(low), float(high))


def curve(path: Path, budget: int) -> Any:
    """Return the regret after each epoch of the budget, `CEILING` at most."""
    found = np.full(budget, CEILING)
    for spent, _, regret in path:
        found[spent - 1 :] = min(regret, CEILING)
    return found


def lead(theirs: Any, ours: Any) -> float:
    """Return how many times fewer epochs ours needs for what the worse one shows at the end.

    Both are curves of each replication, whose medians are compared: since when they keep it.
    """
    a, b = (np.median(np.asarray(side), axis=0) for side in (theirs, ours))
    level = max(a[-1], b[-1])
    return _since(a, level) / _since(b, level)


def _since(falling: Any, level: float) -> int:
    """Return the epoch since which a median keeps a level."""
    above = np.flatnonzero(falling > level)
    return int(above[-1]) + 2 if len(above) else 1


def median_lead(theirs: Sequence[Sequence[Any]], ours: Sequence[Sequence[Any]]) -> Ratio:
    """Return the median lead over problems; the interval resamples the replications."""
    random = np.random.default_rng(0)
    sides = [
        (np.asarray(a, dtype=float), np.asarray(b, dtype=float))
        for a, b in zip(theirs, ours, strict=True)
    ]

    def drawn(side: Any) -> Any:
        return side[random.integers(len(side), size=len(side))]

    middle = np.median([lead(a, b) for a, b in sides])
    draws = [
        np.median([lead(drawn(a), drawn(b)) for a, b in sides]) for _ in range(_LEAD_RESAMPLES)
    ]
    low, high = np.percentile(draws, [2.5, 97.5])
    return Ratio(float(middle), float(low), float(high))


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95 % interval; both ends are the median of a single value."""
    middle = float(np.median(values))
    if len(values) < 2 or len(set(values)) == 1:
        return middle, middle, middle
    draws = np.random.default_rng(0).integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(np.asarray(values)[draws], axis=1), [2.5, 97.5])
    return middle, float(low), float(high)


def by_problem(
    rows: Sequence[Row], workers: int, value: Callable[[Row], Any]
) -> dict[str, dict[str, list[Any]]]:
    """Return a value of each replication that all searches of a problem have, by search."""
    chosen = [row for row in rows if row["workers"] == workers]
    searches = list(dict.fromkeys(row["search"] for row in chosen))
    found: dict[str, dict[str, list[Any]]] = {}
    for name, group in itertools.groupby(
        sorted(chosen, key=lambda row: row["problem"]), key=lambda row: row["problem"]
    ):
        of = {(row["search"], row["seed"]): row for row in group}
        seeds = sorted({seed for _, seed in of})
        common = [one for one in seeds if all((search, one) in of for search in searches)]
        if common:
            found[name] = {
                search: [value(of[search, one]) for one in common] for search in searches
            }
    return found
