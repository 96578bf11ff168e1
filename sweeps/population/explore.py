"""Exploit and explore as pure functions: which member copies which, with what hyperparameters.

The method is that of Jaderberg et al., "Population Based Training of Neural Networks" (2017).
When members pause and wait for each other is in `early_stopping.pbt`. What must not live here:
the ledger, checkpoints (`pbt_exploit`), and the model of `pb2` (`gain_model`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from sweeps.config.search_space import SearchSpace, mutable
from sweeps.config.space import Choice, Distribution, is_number
from trainable.seeding import derive_seed

_FACTORS = (0.8, 1.2)
"""The factors by which a number is perturbed, as in the paper."""
_ATTEMPTS = 8  # perturbations before the point is taken unchanged, if none is allowed


def select_exploits(
    values: Mapping[int, float], *, quantile: float, minimize: bool, seed: int
) -> dict[int, int]:
    """Return which members copy which: by member of the worst share, a donor of the best share.

    Args:
        values: The metric of each member at the rung.
        quantile: The share of members that copy, and the share that is copied. It is at least
            one of two or more members.
        minimize: Whether less is better.
        seed: The seed that draws a donor for each copying member.
    """
    finite = sorted(
        (number for number, value in values.items() if math.isfinite(value)),
        key=lambda n: (values[n] if minimize else -values[n], n),
    )
    ranked = [*finite, *sorted(values.keys() - set(finite))]
    count = min(max(1, int(len(ranked) * quantile)), len(ranked) // 2)
    best = finite[:count]
    worst = sorted(ranked[len(ranked) - count :])
    if not best:
        return {}
    return {n: Random(derive_seed(seed, "donor", n)).choice(best) for n in worst if n not in best}


def explore(
    params: Mapping[str, Any],
    space: SearchSpace,
    *,
    resample: float,
    seed: int,
    fits: Callable[[Mapping[str, Any]], bool] = lambda _: True,
) -> dict[str, Any]:
    """Return parameters near those of a donor.

    A number is multiplied by 0.8 or 1.2, and an option is replaced by a neighbouring one. With
    the probability `resample`, either is drawn anew.

    Args:
        params: The parameters of the donor.
        space: The search space. A point that it forbids is never returned, except `params`.
        resample: The probability of a new draw, for each parameter.
        seed: The seed of all draws.
        fits: Whether a trial can be configured with the parameters. Others are never returned,
            except `params`.
    """
    random = Random(seed)
    for _ in range(_ATTEMPTS):
        found = dict(params)
        for key in mutable(space):
            if key in params:
                anew = random.random() < resample
                change = _drawn if anew else _nearby
                found[key] = change(params[key], space.distributions[key], random)
        if space.allows(found) and fits(found):
            return found
    return dict(params)


def _drawn(value: Any, distribution: Distribution, random: Random) -> Any:
    del value
    return distribution.at(random.random())


def _nearby(value: Any, distribution: Distribution, random: Random) -> Any:
    if isinstance(distribution, Choice):
        if value in distribution.options:
            index = distribution.options.index(value) + random.choice((-1, 1))
            return distribution.options[min(max(index, 0), len(distribution.options) - 1)]
    elif is_number(value):
        return distribution.nearest(value * random.choice(_FACTORS))
    return _drawn(value, distribution, random)  # the user edited the space since
