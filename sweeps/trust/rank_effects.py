"""Estimate how much of a metric's ranking each searched parameter explains alone.

Ranks, because the values of a metric often span orders of magnitude, and one diverged trial would
outweigh all others. It needs neither NumPy nor scikit-learn, whose import takes longer than
`sweep status` may. What must not live here: importance by fANOVA (`report.figures`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from sweeps.spec.space import is_number
from sweeps.statistics.variance_shares import chi_squared_tail

FEWEST_TRIALS = 12
"""With fewer trials, no effect is estimated."""
_MOST_GROUPS = 5
_TRIALS_PER_GROUP = 8


class RankEffect(NamedTuple):
    """The effect of one parameter on the ranking of trials."""

    share: float
    """The share of the variance in rank that the parameter explains, from 0 to 1."""
    chance: float
    """The probability of such a share if the parameter had no effect."""
    num_trials: int


def rank_effects(
    values: Mapping[int, float], params: Mapping[int, Mapping[str, Any]], keys: Sequence[str]
) -> dict[str, RankEffect]:
    """Return the effect of each parameter that has more than one value, the largest first."""
    found = {}
    for key in keys:
        pairs = [(params[n][key], value) for n, value in values.items() if key in params[n]]
        if len(pairs) >= FEWEST_TRIALS and (effect := _effect(pairs)) is not None:
            found[key] = effect
    return dict(sorted(found.items(), key=lambda item: -item[1].share))


def _effect(pairs: Sequence[tuple[Any, float]]) -> RankEffect | None:
    """Compare the ranks between groups of similar parameter values (Kruskal-Wallis test)."""
    ranks = _ranks([value for _, value in pairs])
    groups: dict[Hashable, list[float]] = {}
    for group, rank in zip(_groups([param for param, _ in pairs]), ranks, strict=True):
        groups.setdefault(group, []).append(rank)
    count, mean = len(ranks), fmean(ranks)
    total = sum((rank - mean) ** 2 for rank in ranks)
    if not 1 < len(groups) < count or total == 0:
        return None
    between = sum(len(group) * (fmean(group) - mean) ** 2 for group in groups.values())
    statistic = (count - 1) * between / total
    # Epsilon squared: groups without an effect have a share of 0 on average.
    share = (statistic - len(groups) + 1) / (count - len(groups))
    chance = chi_squared_tail(statistic, len(groups) - 1)
    return RankEffect(min(max(share, 0.0), 1.0), chance, count)


def _ranks(values: Sequence[float]) -> list[float]:
    """Return the rank of each value; equal values share their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for index in order[start:end]:
            ranks[index] = (start + end - 1) / 2
        start = end
    return ranks


def _groups(params: Sequence[Any]) -> list[Hashable]:
    """Return the group of each value: the value itself, or its quantile if there are many."""
    count = max(3, min(_MOST_GROUPS, len(params) // _TRIALS_PER_GROUP))
    if len(set(map(repr, params))) <= count or not all(map(is_number, params)):
        return [repr(param) for param in params]
    size = len(params) / count
    return [int(rank / size) for rank in _ranks(params)]
