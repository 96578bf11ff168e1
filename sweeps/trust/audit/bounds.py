"""Do the best trials lie at a bound of the searched space?

The best fifth is looked at, because a sampler crowds its trials where it found good ones early.
What must not live here: the change of the space (`next_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from sweeps.formatting import format_number
from sweeps.spec.space import Distribution
from sweeps.statistics.proportions import binomial_tail, hypergeometric_tail
from sweeps.trust.audit.card import RUN_MORE, SAME_VALUES, Card
from sweeps.trust.audit.data import AuditData, AuditTrial, top_fifth
from sweeps.trust.evidence import NearBound, Side, ends, near_bounds, place
from sweeps.trust.importance import has_effect

_card = partial(Card, "bounds", "Do the best trials lie at a bound of the space?")
_FEWEST = 20
"""With fewer trials, the best fifth has fewer than four."""
_OUTER = 0.2
"""The part of a range that is at its end."""
_CHANCE = 0.05


@dataclass(frozen=True)
class _AtEnd:
    """How many trials are in the outer fifth of a range."""

    bound: NearBound
    leaders: int
    others: int


def bounds(data: AuditData) -> Card:
    """Warn if most of the best fifth lie in the outer fifth of a range, and its end is good."""
    ranked, leaders = data.ranked, top_fifth(data.ranked)
    keys = [key for key, one in data.space.items() if _outer_share(one) is not None]
    if data.population or not keys:
        why = "trials changed their parameters." if data.population else "no range is searched."
        return _card("does not apply", why)
    if len(ranked) < _FEWEST:
        text = f"Trials with a result: {len(ranked)}; the card needs {_FEWEST}."
        return _card("not enough data", text, remedy=RUN_MORE)
    if flat := data.all_equal([t.value or 0.0 for t in ranked]):
        return _card("not enough data", flat, remedy=SAME_VALUES)
    acts = _acting(data, ranked, leaders)
    found = [one for one in _at_ends(data, ranked, leaders, keys) if acts(one)]
    known = {one.bound.key for one in found}
    near = near_bounds(data.space, data.params, [one.params for one in ranked])  # as in findings
    further = [_count(data, ranked, leaders, one) for one in near if one.key not in known]
    found += filter(acts, further)
    by_chance = [one for one in further if not acts(one)]
    figure = {
        "num_trials": len(ranked),
        "num_leaders": len(leaders),
        "bounds": [
            {
                "key": one.bound.key,
                "side": one.bound.side,
                "bound": one.bound.bound,
                "best": one.bound.value,
                "leaders_at_bound": one.leaders,
                "trials_at_bound": one.leaders + one.others,
            }
            for one in found
        ],
    }
    if not found:
        text = (
            f"None of {len(keys)} ranges has most of the {len(leaders)} best of {len(ranked)} "
            "trials at one of its ends."
        )
        for one in by_chance:
            text += (
                f" The {one.bound.num_leaders} best have {data.name(one.bound.key)} near an end, "
                f"but {data.name(one.bound.key)} has no clear effect."
            )
        return _card("pass", text, figure)
    evidence = " ".join(_sentence(data, one, len(leaders), len(ranked)) for one in found)
    changes = data.overrides((), [one.bound for one in found])
    widened = [word for change in changes for word in ("-s", change)]
    can = any(change.startswith("space.") for change in changes)
    return _card(
        "warn",
        evidence,
        figure,
        "widen the range and continue" if can else "start a sweep with a wider range",
        ("resume", *widened) if can else None,
    )


def _at_ends(
    data: AuditData, ranked: list[AuditTrial], leaders: list[AuditTrial], keys: list[str]
) -> Iterator[_AtEnd]:
    for key in keys:
        low, high = ends(data.space[key])
        share = _outer_share(data.space[key]) or 1.0
        best = ranked[0].params.get(key)
        if best is None:
            continue
        sides: tuple[tuple[Side, float], ...] = (("below", low), ("above", high))
        for side, bound in sides:
            found = _count(data, ranked, leaders, NearBound(key, side, bound, best, len(leaders)))
            chance = binomial_tail(found.leaders, len(leaders), share) * 2 * len(keys)
            if 2 * found.leaders >= len(leaders) and chance < _CHANCE and _rises(data, found):
                yield found


def _acting(
    data: AuditData, ranked: list[AuditTrial], leaders: list[AuditTrial]
) -> Callable[[_AtEnd], bool]:
    """Return whether the parameter of a range has an effect."""
    found = data.importance

    def acts(one: _AtEnd) -> bool:
        if (known := has_effect(found, one.bound.key)) is not None:
            return known
        inside = one.leaders + one.others
        # Too few trials for the effects: the best fifth must lie there more often than others. A
        # sampler that learns crowds its later, better trials also where nothing has an effect.
        return hypergeometric_tail(one.leaders, len(leaders), inside, len(ranked)) < _CHANCE

    return acts


def _count(
    data: AuditData, ranked: list[AuditTrial], leaders: list[AuditTrial], bound: NearBound
) -> _AtEnd:
    inside = {t.number for t in ranked if (_depth(data, t, bound) or 0.0) >= 1 - _OUTER}
    mine = sum(t.number in inside for t in leaders)
    return _AtEnd(bound, mine, len(inside) - mine)


def _rises(data: AuditData, found: _AtEnd) -> bool:
    """Whether the outermost trials of the outer fifth are no worse than the others there."""
    ranked = data.ranked
    placed = [
        (depth, rank)
        for rank, t in enumerate(ranked)
        if (depth := _depth(data, t, found.bound)) is not None and depth >= 1 - _OUTER
    ]
    placed.sort()
    half = len(placed) // 2
    if half == 0:
        return True
    inner, outer = placed[:half], placed[-half:]
    return fmean(rank for _, rank in outer) <= fmean(rank for _, rank in inner)


def _depth(data: AuditData, trial: AuditTrial, bound: NearBound) -> float | None:
    """Return how far towards a bound a trial lies in the range, from 0 to 1."""
    at = place(data.space[bound.key], trial.params.get(bound.key))
    return None if at is None else at if bound.side == "above" else 1 - at


def _outer_share(distribution: Distribution) -> float | None:
    """Return the share of random trials in the outer fifth; None if there is no such place."""
    if place(distribution, distribution.at(0.0)) is None:
        return None
    num = distribution.num_values()
    return _OUTER if num is None else max(_OUTER, 1 / num)


def _sentence(data: AuditData, one: _AtEnd, leaders: int, trials: int) -> str:
    end = "lower" if one.bound.side == "below" else "upper"
    all_there = one.leaders + one.others
    return (
        f"{one.leaders} of the {leaders} best trials have {data.name(one.bound.key)} in the outer "
        f"fifth at the {end} end of its range ({format_number(one.bound.bound)}), where "
        f"{all_there} of all {trials} trials are; the best has {format_number(one.bound.value)}."
    )
