"""Refuse ranges whose values a study cannot keep, or a sampler cannot list.

A study keeps each number as a float of 64 bits. Without these checks, a trial would be trained
with a value near the one that was meant, or its own value would lie outside its range. A sweep
that has trials keeps the ranges that it has. What must not live here: the form of a distribution
(`space_parser`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from sweeps.config.sections import SearchConfig
from sweeps.config.space import Distribution, Int, LogUniform, QUniform, Uniform
from sweeps.errors import Issue
from sweeps.quoting import shown

_MOST_EXACT = 2**53
_MOST_STEPS = 10**7
"""Optuna accepts a value that is at most 1e-8 of a step away from a step."""
_MOST_LISTED = 10**6
"""GP holds all values of a stepped range in memory, and each suggestion looks at them."""


def range_faults(space: Mapping[str, Distribution], search: SearchConfig) -> Iterator[Issue]:
    """Refuse ranges that are too wide.

    Args:
        space: The distributions that are new to a sweep.
        search: The section `search`.
    """
    for key, one in space.items():
        path = ("space", key, one.name)
        if isinstance(one, Uniform | LogUniform | QUniform) and not _is_finite(one):
            yield Issue(
                path,
                f"{'high / low' if isinstance(one, LogUniform) else 'high - low, or high + low,'} "
                "is above 1.8e308, the largest number, and values are drawn by it; write bounds "
                "that are smaller, or closer",
            )
            continue
        if isinstance(one, Int):
            for index, bound in enumerate((one.low, one.high)):
                if abs(bound) > _MOST_EXACT:
                    yield Issue(
                        (*path, index),
                        f"{shown(bound)} is beyond 2**53 ({_MOST_EXACT}); a study keeps numbers "
                        "as floats, which have not every whole number beyond it; write a bound "
                        "up to it, or a choice",
                    )
        steps = max(abs(one.low), abs(one.high)) / one.step if isinstance(one, QUniform) else 0
        if steps > _MOST_STEPS:
            yield Issue(
                path,
                f"its values are up to {steps:.3g} steps of {one.step:g} away from 0; a study "
                f"keeps numbers as floats, and tells {_MOST_STEPS:,} steps apart; write a larger "
                "step, or use uniform",
            )
        listed = one.num_values() if isinstance(one, Int | QUniform) and not one.when else None
        if _is_gp(search.sampler) and listed is not None and listed > _MOST_LISTED:
            yield Issue(
                path,
                f"it has {listed:,} values, and the sampler is gp, which lists the values of int, "
                f"logint and quniform: at most {_MOST_LISTED:,}; use uniform or loguniform, write "
                "larger steps, or another sampler",
            )


def _is_finite(one: Uniform | LogUniform | QUniform) -> bool:
    """Return whether samplers can compute with the bounds; TPE begins with their mean."""
    if isinstance(one, LogUniform):
        return math.isfinite(one.high / one.low)
    return math.isfinite(one.high - one.low) and math.isfinite(one.high + one.low)


def _is_gp(sampler: str) -> bool:
    return sampler.rpartition(":")[2] in ("gp", "GPSampler")
