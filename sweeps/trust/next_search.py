"""Propose how a finished sweep continues: more trials, in a narrowed or widened space.

Each change is checked as a resume checks it, so that the command works. What must not live here:
what was found (`evidence`), and sentences (`findings`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from sweeps.errors import SearchChanged, SpecError, UserError
from sweeps.ledger.trials import of_search
from sweeps.reconcile.stop_criteria import more_trials
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.space import (
    Choice,
    Distribution,
    Int,
    LogInt,
    LogUniform,
    Powers,
    QUniform,
    Uniform,
)
from sweeps.spec.spec import parse_with_positions
from sweeps.trust.evidence import NearBound, Region, place, scale
from sweeps.view.sweep_view import SweepView

_WIDER = 1 / 3
"""By this part of its width, on its scale, a range grows beyond an end."""
_MOST_TIMES = 10
"""A range with a logarithmic scale grows at most by this factor."""
_NARROWEST = 0.1
"""A smaller part of a range is not worth cutting off."""


def next_overrides(
    view: SweepView, regions: Sequence[Region], bounds: Sequence[NearBound]
) -> tuple[str, ...]:
    """Return overrides of `sweep resume` that continue a sweep; none if it cannot continue."""
    spec = view.spec
    if spec.is_of_script:
        return ()
    more = more_trials(spec, len(of_search(view.records)), view.stop)
    if not more or spec.search.sampler == "grid" or spec.early_stopping.rule.is_population:
        return more
    changed: dict[str, Distribution] = dict(spec.space)
    for key, fields in _changes(spec.space, regions, bounds):
        if not fields:
            continue
        tried = {**changed, key: _changed(changed[key], fields)}
        if _is_accepted(view, (*more, *_written(view, tried))):
            changed = tried
    return (*more, *_written(view, changed))


def _written(view: SweepView, space: Mapping[str, Distribution]) -> Iterator[str]:
    for key, distribution in space.items():
        if distribution != view.spec.space[key]:
            yield f"space.{key}={distribution}"


def _is_accepted(view: SweepView, overrides: Sequence[str]) -> bool:
    """Whether a resume accepts overrides."""
    written, file, drawn = view.revision.text, str(view.paths.spec), len(of_search(view.records))
    try:
        after, _ = parse_with_positions(written, file, overrides, drawn=drawn)
        check_search_changes(view.spec, after, drawn)
    except (SearchChanged, SpecError, UserError):
        return False
    return True


def _changed(distribution: Distribution, fields: Mapping[str, Any]) -> Distribution:
    """Return a distribution with other fields, without a prior that is outside then."""
    found = replace(distribution, **fields)
    lost = found.prior is not None and not found.contains(found.prior.value)
    return replace(found, prior=None) if lost else found


def _changes(
    space: Mapping[str, Distribution], regions: Sequence[Region], bounds: Sequence[NearBound]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the changed fields of distributions, by key."""
    for region in regions:
        yield region.key, _narrowed(space[region.key], region)
    for bound in bounds:
        yield bound.key, _widened(space[bound.key], bound)


def _narrowed(distribution: Distribution, region: Region) -> dict[str, Any]:
    """Return the fields that exclude a bad region; none if that is not worth it."""
    if isinstance(distribution, Powers):
        return {}
    if isinstance(distribution, Choice):
        options = tuple(o for o in distribution.options if repr(o) != repr(region.value))
        return {"options": options} if len(options) > 1 else {}
    at = place(distribution, region.value)
    if at is None:
        return {}
    low, high, *_ = distribution.arguments()
    if region.side == "below" and at >= _NARROWEST:
        return {"low": max(low, _rounded(distribution, region.value, down=True))}
    if region.side == "above" and at <= 1 - _NARROWEST:
        return {"high": min(high, _rounded(distribution, region.value, down=False))}
    return {}


def _widened(distribution: Distribution, bound: NearBound) -> dict[str, Any]:
    """Return the field that makes a range wider at one end; none if it cannot grow there."""
    low, high, *_ = distribution.arguments()
    scaled, up = scale(distribution), bound.side == "above"
    log = isinstance(distribution, LogUniform | LogInt)
    width = (scaled(high) - scaled(low)) * _WIDER
    width = min(width, math.log(_MOST_TIMES)) if log else width
    end = scaled(bound.bound) + (width if up else -width)
    end = math.exp(end) if log else end
    # Most parameters that were never negative cannot be, and a share is at most 1.
    if not up and low >= 0:
        end = max(end, 1 if isinstance(distribution, Int) and low >= 1 else 0)
    if up and low >= 0 and high <= 1 and isinstance(distribution, Uniform | QUniform):
        end = min(end, 1)
    end = _rounded(distribution, end, down=not up)
    if up:
        return {"high": end} if end > high else {}
    return {"low": end} if end < low else {}


def _rounded(distribution: Distribution, value: float, *, down: bool) -> float:
    """Return a value with two significant digits, or on the steps of a distribution."""
    rounding = ROUND_FLOOR if down else ROUND_CEILING
    exact = Decimal(f"{value:.10g}")  # without the rounding errors of a logarithm
    if isinstance(distribution, QUniform | Int) and not isinstance(distribution, LogInt):
        low, step = Decimal(str(distribution.low)), Decimal(str(distribution.step))
        found = low + ((exact - low) / step).to_integral_value(rounding) * step
    elif isinstance(distribution, LogInt):
        found = exact.to_integral_value(rounding)
    elif not exact:
        return 0.0
    else:
        found = exact.quantize(Decimal(1).scaleb(exact.adjusted() - 1), rounding)
    return int(found) if isinstance(distribution, Int) else float(found)
