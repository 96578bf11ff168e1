"""Population based training as pure functions: who goes on from whom, and with what.

Every trial is a member and pauses at each rung until all have come to it. Then the worst go on
from the best ones' weights with other hyperparameters: Jaderberg et al., "Population Based
Training of Neural Networks" (2017), in generations that wait for each other, so that a decision
depends on what was reported and on nothing that a death could lose. What must not live here: the
ledger, checkpoints (`exploit`), and the model of `pb2` (`bandit`).
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
"""By which a number is changed; as in the paper."""
_ATTEMPTS = 8  # changes of a point before it is taken as it is, if none is allowed


def select_exploits(
    values: Mapping[int, float], *, quantile: float, minimize: bool, seed: int
) -> dict[int, int]:
    """Return who goes on from whom: by member of the worst share, one of the best share.

    Args:
        values: What each member reported at the rung.
        quantile: The share that is replaced, and the share that it is replaced from; at least one
            of two or more members.
        seed: Draws one of the best for each of the worst.
    """
    sound = sorted(
        (number for number, value in values.items() if math.isfinite(value)),
        key=lambda n: (values[n] if minimize else -values[n], n),
    )
    ranked = [*sound, *sorted(values.keys() - set(sound))]
    count = min(max(1, int(len(ranked) * quantile)), len(ranked) // 2)
    best = sound[:count]
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
    """Return parameters near those of the member that is inherited from.

    A number is multiplied by 0.8 or 1.2, and a choice replaced by one beside it; with the
    probability `resample` either is drawn anew.

    Args:
        params: Of the member that is inherited from.
        space: What each may be; a point that it does not allow is never returned, unless it is
            `params`.
        resample: A probability.
        seed: Draws.
        fits: Whether a trial can be configured so; one that cannot is returned no more than one
            that the space does not allow.
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
    return _drawn(value, distribution, random)  # the space was edited since
