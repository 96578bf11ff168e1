"""Refuse ranges whose values a study cannot keep, or a sampler cannot list.

A study keeps each number as a float of 64 bits. Without these checks, a trial would be trained
with a value near the one that was meant, or its own value would lie outside its range. A sweep
that has trials keeps the ranges that it has. What must not live here: the form of a distribution
(`space_parser`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from sweeps.errors import Issue
from sweeps.formatting import shown
from sweeps.spec.sections import SearchConfig
from sweeps.spec.space import Distribution, Int, LogUniform, QUniform, Uniform

_MOST_EXACT = 2**53
_MOST_STEPS = 10**7
"""Optuna accepts a value that is at most 1e-8 of a step away from a step."""
_MOST_LISTED = 10**6
"""GP holds all values of a stepped range in memory, and each suggestion looks at them."""


def range_faults(space: Mapping[str, Distribution], search: SearchConfig) -> Iterator[Issue]:
    """Refuse ranges that are too wide."""
    for key, one in space.items():
        path = ("space", key, one.name)
        for index, bound in enumerate((one.low, one.high) if isinstance(one, Int) else ()):
            if abs(bound) > _MOST_EXACT:
                yield Issue(
                    (*path, index),
                    f"{shown(bound)} is beyond 2**53 ({_MOST_EXACT}); a study keeps numbers as "
                    "floats, which have not every whole number beyond it; write a bound up to "
                    "it, or a choice",
                )
        if (
            problem := _problem(one, is_listed=_is_gp(search.sampler) and not one.when)
        ) is not None:
            yield Issue(path, problem)


def _problem(one: Distribution, *, is_listed: bool) -> str | None:
    """Return why a range is too wide; None if it is not."""
    if isinstance(one, Uniform | LogUniform | QUniform) and (what := _overflow(one)) is not None:
        return (
            f"{what} is above 1.8e308, the largest number, and values are drawn by it; write "
            f"{'closer' if isinstance(one, LogUniform) else 'smaller'} bounds"
        )
    if isinstance(one, QUniform):
        steps = max(abs(one.low), abs(one.high)) / one.step
        if steps > _MOST_STEPS:
            return (
                f"its values are up to {steps:.3g} steps of {one.step:g} away from 0; a study "
                f"keeps numbers as floats, and tells {_MOST_STEPS:,} steps apart; write a larger "
                "step, or use uniform"
            )
    values = one.num_values() if isinstance(one, Int | QUniform) and is_listed else None
    if values is not None and values > _MOST_LISTED:
        return (
            f"it has {values:,} values, and the sampler is gp, which lists the values of int, "
            f"logint and quniform: at most {_MOST_LISTED:,}; use uniform or loguniform, write "
            "larger steps, or another sampler"
        )
    return None


def _overflow(one: Uniform | LogUniform | QUniform) -> str | None:
    """Return what samplers compute of the bounds that is no finite number; None without any."""
    low, high = one.low, one.high
    if isinstance(one, LogUniform):
        return None if math.isfinite(high / low) else "high / low"
    if not math.isfinite(high - low):
        return "high - low"
    return None if math.isfinite(high + low) else "high + low"  # TPE begins with their mean


def _is_gp(sampler: str) -> bool:
    return sampler.rpartition(":")[2] in ("gp", "GPSampler")
