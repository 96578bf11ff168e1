"""The values of a training by a rung, and which ends of a training say nothing of its parameters.

The one definition for what samplers see, for the evidence of priors, and for what a warm start
keeps of earlier sweeps. What must not live here: the form in which a sampler receives a trial
(`search.trial_evidence`), and the values that stopping rules compare (`stopping`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from sweeps.ledger.ranking import is_finite, value_of
from sweeps.ledger.stop_reasons import is_by_request
from sweeps.spec.sections import Select
from sweeps.stopping.metric_values import Value, all_values
from sweeps.stopping.patience import BY_PATIENCE

NOT_FINITE = (math.nan,)
"""The values of a training that has reached a rung and has no finite value there."""


def values_by(
    reports: Mapping[int, Value], rung: int, *, minimize: bool, select: Select
) -> tuple[float, ...]:
    """Return the values of a training that reached a rung, or ended before it; `NOT_FINITE`."""
    so_far = {epoch: all_values(one) for epoch, one in reports.items() if epoch <= rung}
    return value_of(so_far, minimize=minimize, select=select) or NOT_FINITE


def values_over_seeds(
    every: Sequence[tuple[float, ...]], combine: Callable[[Sequence[float]], float]
) -> tuple[float, ...]:
    """Return the values of a configuration by those of its seeds at a rung; `NOT_FINITE`.

    Each seed has its own best report, as in the value of an ended configuration. The best of a
    curve over seeds would be another number.
    """
    if not all(map(is_finite, every)):
        return NOT_FINITE
    return tuple(combine(metric) for metric in zip(*every, strict=True))


def is_cut_off(
    *, complete: bool, reason: str | None, last: int, budget: int, earlier: Collection[int]
) -> bool:
    """Return whether the end of a trial, complete or pruned, says nothing of its parameters.

    So does a request, and the end of a budget that was shorter than today's. A trial that ended
    by patience, or whose own loop ended, has trained to its end under any budget.
    """
    if not complete:
        return is_by_request(reason)
    return last < budget and last in earlier and not (reason or "").startswith(BY_PATIENCE)
