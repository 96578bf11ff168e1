"""The tables of P9: medians and means with bootstrapped 95 % intervals, and Mann-Whitney's test.

A search that did not get there is counted with all that it was given, which favours it. What must
not live here: measuring.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from tests.bench.quality_cases import CASES, OURS, PEERS, PUBLISHED, RANDOM, STOCK, Size
from tests.bench.rows_file import Row
from tests.bench.table import Goal, Result

KEYS = ("table", "problem", "search", "at_once", "seed", "size")
"""What a row is known by."""


def found_table(size: Size, rows: list[Row]) -> list[Result]:
    """Print the table, and return the lines that have a goal."""
    lines, results = [], []
    for problem, at_once in itertools.product(size.problems, size.at_once):
        losses = {
            search: [
                row["best"]
                for row in rows
                if _is(row, "found", problem, search, at_once, size)
                and row["size"] == size.evaluations
            ]
            for search in size.searches
        }
        for search, values in losses.items():
            if len(values) < 2:
                continue
            low, high = _interval(np.mean, values)
            chance = _less(values, losses.get("random", []))
            lines.append(
                (
                    problem,
                    str(at_once),
                    search,
                    str(len(values)),
                    f"{np.mean(values):.3f} ({low:.3f} to {high:.3f})",
                    f"{np.median(values):.3f}",
                    PUBLISHED.get((problem, search), ""),
                    "" if search == "random" else f"{chance:.2g}",
                )
            )
            if search == "tpe":
                row = f"P9 {problem}, {at_once} at once, {len(values)} seeds: p of tpe = random"
                results.append(Result(row, chance, None, "", (), Goal("ours", 0.05)))
    print(f"the best of {size.evaluations} evaluations, the whole path\n")
    head = ("problem", "at once", "sampler", "seeds", "mean (95 %)", "median", "published", "p")
    print(ruled([head, *lines]))
    return results


def epochs_table(size: Size, rows: list[Row]) -> list[Result]:
    """Print the table, and return the lines that have a goal."""
    lines, results = [], []
    for problem, at_once in itertools.product(size.problems, size.at_once):
        case = CASES[problem]
        for level in case.levels:
            spent = {
                search: [
                    row["reached"].get(str(level), case.budget)
                    for row in rows
                    if _is(row, "epochs", problem, search, at_once, size)
                    and row["size"] == case.budget
                ]
                for search in size.searches
            }
            for search, values in spent.items():
                if len(values) < 2:
                    continue
                low, high = _interval(np.median, values)
                lines.append(
                    (
                        problem,
                        f"{level:g}",
                        search,
                        f"{sum(one < case.budget for one in values)} of {len(values)}",
                        f"{np.median(values):.0f} ({low:.0f} to {high:.0f})",
                        *(_against(spent.get(peer, []), values) for peer in PEERS),
                    )
                )
            if level == case.levels[0]:
                results += _goals(f"P9 {problem} to {level:g}", spent)
    print("epochs until the best trial is as good; at once:", *size.at_once, end="\n\n")
    head = ("problem", "to", "search", "reached", "median epochs (95 %)")
    print(ruled([(*head, *(f"{peer} / it" for peer in PEERS)), *lines]))
    return results


def _goals(row: str, spent: dict[str, list[int]]) -> list[Result]:
    """Ours divided by each peer's; as the ratios stand the interval's ends and the middle."""
    ours, results = spent.get(OURS, []), []
    for peer, goal in ((STOCK, 1 / 1.5), (RANDOM, 1 / 5)):
        theirs = spent.get(peer, [])
        if len(ours) > 1 and len(theirs) > 1:
            low, high = ratio_interval(ours, theirs)
            middle = float(np.median(ours) / np.median(theirs))
            results.append(
                Result(
                    f"{row}, {len(ours)} seeds (95 %) / {peer}",
                    float(np.median(ours)),
                    float(np.median(theirs)),
                    "epochs",
                    (low, middle, high),
                    Goal("ratio", goal),
                )
            )
    return results


def _against(peer: Sequence[float], values: Sequence[float]) -> str:
    if len(peer) < 2 or peer == values:
        return ""
    low, high = ratio_interval(peer, values)
    ratio = np.median(peer) / np.median(values)
    return f"{ratio:.2f} ({low:.2f} to {high:.2f}) p {_less(values, peer):.2g}"


def _interval(of: Callable[..., Any], values: Sequence[float]) -> tuple[float, float]:
    found = stats.bootstrap((values,), of, method="percentile", rng=0).confidence_interval
    return float(found.low), float(found.high)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of a median."""
    return _interval(np.median, values)


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of two medians."""

    def ratio(a: Any, b: Any, axis: int) -> Any:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    found = stats.bootstrap((first, second), ratio, method="percentile", rng=0)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def _less(values: Sequence[float], others: Sequence[float]) -> float:
    """The probability, if both were alike, that `values` come out so much smaller."""
    if not others:
        return float("nan")
    return float(stats.mannwhitneyu(values, others, alternative="less").pvalue)


def _is(row: Row, table: str, problem: str, search: str, at_once: int, size: Size) -> bool:
    kind = tuple(row[key] for key in KEYS[:4])
    return kind == (table, problem, search, at_once) and row["seed"] < size.seeds


def ruled(lines: Sequence[Sequence[str]]) -> str:
    """Return cells as text in columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
