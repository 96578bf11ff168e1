"""What mattered in a sweep: one number for each searched parameter, with its interval.

It is the share that the parameter explains of the order in which trials end. Findings, the audit,
the figure and JSON show this number. A trial that was stopped has the place in that order that it
had, where it was stopped, among those that trained on (ADR 0050). What must not live here: the
estimate of the shares (`statistics.variance_shares`), and drawing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from sweeps.formatting import listed
from sweeps.ledger.over_seeds import origins
from sweeps.ledger.trials import of_search
from sweeps.spec.space import Choice, Distribution, is_number
from sweeps.statistics.variance_shares import Share, VarianceShares, least_count, variance_shares
from sweeps.stopping.metric_values import first_value
from sweeps.stopping.seed_means import over_seeds
from sweeps.trust.evidence import ends, scale
from sweeps.view.sweep_view import SweepView

Curves = Mapping[int, Mapping[int, float]]
Params = Mapping[int, Mapping[str, Any]]
_CHANCE = 0.01
"""An effect whose size is not known is one if chance shows such coefficients more rarely."""


_NO_EFFECT = 0.01
"""With a larger chance of its share without any effect, a parameter has no clear one."""


def has_effect(found: VarianceShares | None, key: str) -> bool | None:
    """Return whether a parameter has a clear effect; None: there are too few trials to say."""
    if found is None or key not in found.shares:
        return None
    return found.shares[key].chance < _NO_EFFECT


def search_curves(view: SweepView) -> dict[int, Mapping[int, float]]:
    """Return the reports of each trial of the search.

    Those over several seeds are the mean or the median of these. A stopped trial that was trained
    to its end later has these reports, too.
    """
    curves = view.ledger.reports()
    found: dict[int, Mapping[int, float]] = dict(curves)
    if view.spec.repeats.seeds > 1:
        seeds = over_seeds(curves, origins(view.records), view.spec.repeats.combine)
        found = {
            number: {epoch: first_value(value) for epoch, value in one.items()}
            for number, one in seeds.items()
        }
    for record in view.records:
        if record.finishes is not None and record.state == "complete":
            found[record.finishes] = {**found.get(record.finishes, {}), **curves[record.number]}
    return {record.number: found.get(record.number, {}) for record in of_search(view.records)}


def final_places(curves: Curves, *, minimize: bool, final: bool = False) -> dict[int, float]:
    """Return the place of each trial in the order in which trials end, 0 for the best.

    A trial that ended earlier than others is put among these by its rank there: behind as many of
    them as had a better value when it ended. Equal ones share their mean place. A trial without a
    finite value has no place.

    Args:
        curves: The reports of each trial.
        minimize: Whether less is better.
        final: Whether a value is the last report, and not the best one so far.
    """
    losses = {}
    for number, curve in curves.items():
        known = sorted((at, value) for at, value in curve.items() if math.isfinite(value))
        values = [value if minimize else -value for _, value in known]
        so_far = values if final else list(accumulate(values, min))
        if known:
            losses[number] = [at for at, _ in known], so_far

    def loss_by(number: int, end: int) -> float:
        epochs, values = losses[number]
        until = bisect_right(epochs, end)
        return values[until - 1] if until else math.inf

    places: dict[int, float] = {}
    for end in sorted({epochs[-1] for epochs, _ in losses.values()}, reverse=True):
        longer = sorted(loss_by(number, end) for number in places)
        order = {number: (place, 0.0, 0.0) for number, place in places.items()}
        for number, (epochs, values) in losses.items():
            if epochs[-1] == end:
                order[number] = (bisect_left(longer, values[-1]) - 0.5, 1.0, values[-1])
        places = mean_ranks(order)
    return places


def mean_ranks(values: Mapping[int, Any]) -> dict[int, float]:
    """Return the rank of each value from 0; equal values share their mean rank."""
    ordered = sorted(values.values())
    return {
        number: (bisect_left(ordered, value) + bisect_right(ordered, value) - 1) / 2
        for number, value in values.items()
    }


def importance(
    space: Mapping[str, Distribution], params: Params, places: Mapping[int, float]
) -> VarianceShares | None:
    """Return which share of the order of trials each parameter explains; None for too few."""
    numbers = [number for number in places if number in params]
    return variance_shares(
        _positions(space, params, numbers), [places[number] for number in numbers]
    )


def least_trials(space: Mapping[str, Distribution], params: Params) -> int:
    """Return how many trials `importance` needs."""
    return least_count(_positions(space, params, list(params)))


def importance_of(view: SweepView) -> VarianceShares | None:
    """Return what mattered among the ended trials of a sweep; None if that cannot be told."""
    if view.spec.early_stopping.rule.is_population:  # its trials change their parameters
        return None
    params = {record.number: record.best_params for record in of_search(view.records)}
    return importance(view.spec.space, params, ended_places(view))


def ended_places(view: SweepView) -> dict[int, float]:
    """Return the place of each ended trial of a sweep in the order in which trials end."""
    curves = search_curves(view)
    ended = [r.number for r in of_search(view.records) if r.finished and r.state != "failed"]
    return final_places(
        {number: curves[number] for number in ended},
        minimize=view.ledger.minimize,
        final=view.spec.select == "final",
    )


def as_numbers(share: Share) -> dict[str, float]:
    """Return a share as JSON."""
    return {"share": share.value, "low": share.low, "high": share.high}


def importance_sentence(found: VarianceShares, names: Mapping[str, str], metric: str) -> str:
    """Return what mattered, what had no clear effect, and of what neither is known."""
    how = f"how {found.num_trials} trials rank by {metric} at the end"
    known = [(names[key], one) for key, one in found.shares.items() if one.is_known]
    unknown = [(names[key], one) for key, one in found.shares.items() if not one.is_known]
    clear = [(name, _of(one)) for name, one in known if one.is_clear]
    unclear = [f"{n} (at most {percent(one.high)})" for n, one in known if not one.is_clear]
    real = [(name, _of(one)) for name, one in unknown if one.chance < _CHANCE]
    other = [f"{name} {_of(one)}" for name, one in unknown if one.chance >= _CHANCE]
    parts = []
    if clear:
        (first, share), *rest = clear
        then = "".join(f"; {name} {mine}" for name, mine in rest)
        parts.append(f"{first} mattered most: it explains {share} of {how}{then}.")
    if real:
        on = "" if parts else f" on {how}"
        sizes = listed([share for _, share in real])
        effects = listed([name for name, _ in real])
        parts.append(f"{effects} had an effect{on}; how large is not known yet: {sizes}.")
    if unclear:
        parts.append(f"No clear effect of {listed(unclear)}{'' if parts else f' on {how}'}.")
    if other:
        parts.append(f"Not known yet{'' if parts else f' of {how}'}: {listed(other)}.")
    return " ".join(parts)


def _of(share: Share) -> str:
    return f"{percent(share.value)} ({100 * share.low:.0f} to {percent(share.high)})"


def percent(share: float) -> str:
    """Format a share as whole percents."""
    return f"{100 * share:.0f} %"


def _positions(
    space: Mapping[str, Distribution], params: Params, numbers: Sequence[int]
) -> dict[str, list[float | str | None]]:
    return {
        key: _positions_of(one, [params[number].get(key) for number in numbers])
        for key, one in space.items()
    }


def _positions_of(distribution: Distribution, values: Sequence[Any]) -> list[float | str | None]:
    """Return where each value lies from 0 to 1, or the option that it is; None without a value.

    A resume may have changed the space, so that trials lie outside of it: the range is that of
    the space and of all trials.
    """
    having = [value for value in values if value is not None]
    if isinstance(distribution, Choice):
        options = {repr(value): value for value in (*distribution.options, *having)}
        if len(options) < 2 or not all(map(is_number, options.values())):
            return [None if value is None else repr(value) for value in values]
        order = sorted(options, key=options.__getitem__)
        return [None if v is None else order.index(repr(v)) / (len(order) - 1) for v in values]
    scaled, known = scale(distribution), [*ends(distribution)]
    least = 0.0 if scaled is math.log else -math.inf
    placed = [value if is_number(value) and value > least else None for value in values]
    known += [value for value in placed if value is not None]
    start, width = scaled(min(known)), scaled(max(known)) - scaled(min(known))
    return [(scaled(v) - start) / width if v is not None and width else None for v in placed]
