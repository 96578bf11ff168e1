"""Where in the space do trials diverge or fail?

What must not live here: regions of one parameter in which all trials failed (`evidence`), and
the reasons of failures (`findings`).
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sweeps.formatting import counted
from sweeps.spec.space import Choice, is_number
from sweeps.statistics.proportions import hypergeometric_tail, wilson_interval
from sweeps.trust.audit.card import RUN_MORE, Card
from sweeps.trust.audit.data import AuditData
from sweeps.trust.evidence import Params, Region, by_option, ends, values_of

_card = partial(Card, "failures", "Where do trials diverge or fail?")
_FEWEST_FAILED = 4
_FEWEST = 10
_CHANCE = 0.05
_MOST_THRESHOLDS = 12
"""The most thresholds of one parameter on one side."""
_LEAST_SHARE = 0.6
"""In a bad region, at least this part of the trials fails."""
_MOST_FAILED = 0.1
"""More failures than this are a fault, wherever they are."""


@dataclass(frozen=True)
class FailingRegion:
    """A part of the space, of one or two parameters, in which trials fail more often."""

    sides: Sequence[Region]
    num_failed: int
    num_trials: int
    chance: float
    """The probability that chance alone would show such a region anywhere in the space."""


def failures(data: AuditData) -> Card:
    """Warn of a region in which most trials diverge or fail, or of many failures anywhere."""
    bad = {t.number for t in data.trials if t.diverged}
    count = len(data.trials)
    figure: dict[str, Any] = {"num_failed": len(bad), "num_trials": count, "region": None}
    if count < _FEWEST:
        text = f"{len(bad)} of {counted(count, 'trial')} failed; the card needs {_FEWEST} trials."
        return _card("not enough data", text, figure, RUN_MORE)
    said = f"{len(bad)} of {count} trials diverged or failed"
    region = None
    if len(bad) >= _FEWEST_FAILED and not data.population:
        region = worst_region(data, bad)
    low, high = wilson_interval(len(bad), count)
    if region is None:
        if low > _MOST_FAILED:
            text = f"{said} ({low:.0%} to {high:.0%}), in no particular part of the space."
            remedy = "read why they failed"
            return _card("warn", text, figure, remedy, ("trials", "--state", "failed"))
        where = ", in no particular part of the space" if len(bad) >= _FEWEST_FAILED else ""
        return _card("pass", f"{said}{where}.", figure)
    words = " with ".join(side.words(data.name(side.key)) for side in region.sides)
    figure["region"] = {
        "sides": [[side.key, side.side, side.value] for side in region.sides],
        "num_failed": region.num_failed,
        "num_trials": region.num_trials,
        "chance": region.chance,
    }
    outside = len(bad) - region.num_failed
    evidence = (
        f"{said}: {region.num_failed} of the {region.num_trials} with {words}, and {outside} of "
        f"the {count - region.num_trials} elsewhere."
    )
    remedy = f"leave out {words}"
    return _card("warn", evidence, figure, remedy, _command(data, region))


def worst_region(data: AuditData, bad: set[int]) -> FailingRegion | None:
    """Return the region that chance explains least; None if chance explains all.

    Candidates are halves of one parameter's range (or one option), and intersections of two. Their
    chance is that of Fisher's exact test times the number of candidates (Bonferroni). Two
    parameters are preferred to a single one only if their chance is a hundred times smaller.
    """
    params = data.params
    sides = [side for key in data.space for side in _sides(data, key, params, bad)]
    count, marked = len(params), len(bad)
    found: list[FailingRegion] = []
    pairs = [pair for pair in itertools.combinations(sides, 2) if pair[0].key != pair[1].key]
    candidates: list[Sequence[Region]] = [(side,) for side in sides]
    candidates += pairs
    tested = 1 + len(sides), 1 + len(pairs)
    limits: dict[tuple[int, int], float] = {}
    for one in candidates:
        inside = one[0].trials if len(one) == 1 else one[0].trials & one[1].trials
        hits = len(inside & bad)
        if hits < _FEWEST_FAILED or hits < _LEAST_SHARE * len(inside):
            continue
        at = (hits, len(inside))
        if at not in limits:
            limits[at] = hypergeometric_tail(hits, len(inside), marked, count)
        # Half of the risk is for regions of one parameter, half for those of two.
        chance = 2 * tested[len(one) - 1] * limits[at]
        if chance < _CHANCE:
            found.append(FailingRegion(one, hits, len(inside), chance))
    single = [one for one in found if len(one.sides) == 1]
    simple = min(single, key=lambda one: one.chance, default=None)
    best = min(found, key=lambda one: one.chance, default=None)
    if simple is None or best is None:
        return best
    return best if best.chance < simple.chance / 100 else simple


def _sides(data: AuditData, key: str, params: Params, bad: set[int]) -> Iterator[Region]:
    distribution = data.space[key]
    points = values_of(key, params)
    if isinstance(distribution, Choice):
        yield from by_option(key, distribution, points)
        return
    numbers = [(n, value) for n, value in points if is_number(value)]
    good = sorted({value for n, value in numbers if n not in bad})
    failed = sorted({value for n, value in numbers if n in bad})
    for side in ("below", "above"):
        # A region ends at a trial that did not fail: the first value beyond it.
        edges = set()
        for value in failed:
            at = bisect_right(good, value) if side == "below" else bisect_left(good, value) - 1
            if 0 <= at < len(good):
                edges.add(good[at])
        step = max(1, -(-len(edges) // _MOST_THRESHOLDS))
        for edge in sorted(edges)[::step]:
            mine = frozenset(
                n for n, value in numbers if (value < edge if side == "below" else value > edge)
            )
            yield Region(key, "below" if side == "below" else "above", edge, mine)


def _command(data: AuditData, region: FailingRegion) -> Sequence[str] | None:
    """Return the command that leaves a region out of the space; None if none can say it."""
    if len(region.sides) == 1:
        (side,) = region.sides
        changes = data.overrides([side], ())
        if any(change.startswith("space.") for change in changes):
            return ("resume", *(word for change in changes for word in ("-s", change)))
        return None
    text = _constraint(data, region.sides)
    if text is None:
        return None
    quoted = ", ".join(f'"{one}"' for one in (*data.constraints, text))
    return ("init", "-s", f"search.constraints=[{quoted}]")


def _constraint(data: AuditData, sides: Sequence[Region]) -> str | None:
    """Return the constraint that is broken just where both sides meet."""
    if any(side.side == "equal" or side.value <= 0 for side in sides):
        return None
    if any(ends(data.space[side.key])[0] < 0 for side in sides):
        return None
    # `key // value`: 0 below a value, at least 1 above it, for numbers that are not negative
    first, second = (f"{side.key} // {side.value:.4g}" for side in sides)
    which = [side.side for side in sides]
    if which == ["below", "below"]:
        return f"{first} + {second} >= 1"
    if which == ["above", "above"]:
        return f"({first}) * ({second}) == 0"
    above, below = (first, second) if which[0] == "above" else (second, first)
    key = sides[0] if which[0] == "above" else sides[1]
    most = int(ends(data.space[key.key])[1] // key.value) + 1
    return f"{above} <= {most} * ({below})"
