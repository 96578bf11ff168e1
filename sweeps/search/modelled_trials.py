"""Choose the trials that TPE models, where a sweep has very many.

TPE builds one density over its best trials and one over all others. The second one hardly changes
with their number, but its cost does. Of several metrics Optuna takes a tenth of all as the best,
so that it receives all. What must not live here: the densities, which are Optuna's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

MOST_MODELLED = 2_000
"""So many ended trials TPE receives at most. Those left out look untried to it: in a space of two
parameters it suggests points near them again."""
_BEST = 25
"""So many trials Optuna's TPE counts among the best at most (`default_gamma`)."""


def modelled_trials(
    trials: Sequence[FrozenTrial], *, minimize: bool, most: int = MOST_MODELLED
) -> list[FrozenTrial]:
    """Return all trials, or the best of them, an even choice of the others and the running ones.

    The choice follows from the trials alone. Their order remains, because TPE gives older trials
    less weight.

    Args:
        trials: The trials that TPE would otherwise receive, of a single metric.
        minimize: Whether less is better.
        most: How many ended trials are returned at most; more than 250, so that the number of the
            best remains.
    """
    places: dict[TrialState, list[int]] = {state: [] for state in TrialState}
    for place, trial in enumerate(trials):
        places[trial.state].append(place)
    complete = places[TrialState.COMPLETE]
    ended = sorted(complete + places[TrialState.PRUNED])
    if len(ended) <= most:
        return list(trials)
    ranked = complete if len(complete) >= _BEST else ended
    best = set(
        heapq.nsmallest(_BEST, ranked, key=lambda place: _rank(trials[place], minimize=minimize))
    )
    others = [place for place in ended if place not in best]
    left = most - len(best)
    # The newest is always among them.
    kept = best | {others[-1 - index * len(others) // left] for index in range(left)}
    return [trials[place] for place in sorted(kept.union(places[TrialState.RUNNING]))]


def _rank(trial: FrozenTrial, *, minimize: bool) -> tuple[float, ...]:
    """Return the order in which Optuna's TPE ranks ended trials, the best first."""
    sign = 1 if minimize else -1
    if trial.state == TrialState.COMPLETE:
        assert trial.values is not None
        return 0, 0, sign * trial.values[0]
    if not trial.intermediate_values:
        return 1, 1, 0
    epoch, value = max(trial.intermediate_values.items())
    return 1, -epoch, math.inf if math.isnan(value) else sign * value
