"""Choose the trials that TPE models, where a sweep has very many.

TPE builds one density over its best trials and one over all others. The second one hardly changes
with their number, but its cost does. Of a single metric Optuna takes at most 25 trials as the
best, of several metrics a tenth, the Pareto front first. What must not live here: the densities,
which are Optuna's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

MOST_MODELLED = 1_000
"""So many ended trials TPE receives at most."""
_BEST = 25
"""So many trials Optuna's TPE counts among the best at most (`default_gamma`)."""


def modelled_trials(
    trials: Sequence[FrozenTrial],
    directions: Sequence[StudyDirection],
    *,
    most: int = MOST_MODELLED,
) -> list[FrozenTrial]:
    """Return all trials, or the best of them, an even choice of the others and the running ones.

    With several metrics the best are the Pareto front. The choice follows from the trials alone.
    Their order remains, because TPE gives older trials less weight.

    Args:
        trials: The trials that TPE would otherwise receive.
        directions: The direction of each metric.
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
    signs = [1 if one == StudyDirection.MINIMIZE else -1 for one in directions]
    if len(signs) > 1:
        best = _evenly(_front(trials, complete, signs), most // 2)
    else:
        ranked = complete if len(complete) >= _BEST else ended
        best = set(heapq.nsmallest(_BEST, ranked, key=lambda one: _rank(trials[one], *signs)))
    others = [place for place in ended if place not in best]
    kept = best | _evenly(others, most - len(best))
    return [trials[place] for place in sorted(kept.union(places[TrialState.RUNNING]))]


def _evenly(places: Sequence[int], most: int) -> set[int]:
    """Return so many of the places at equal distances, the newest among them."""
    count = min(len(places), most)
    return {places[-1 - index * len(places) // count] for index in range(count)}


def _front(
    trials: Sequence[FrozenTrial], complete: Sequence[int], signs: Sequence[int]
) -> list[int]:
    """Return the places of complete trials that no other dominates, of equal ones the first."""
    losses = np.array([trials[place].values for place in complete]) * signs
    left, front = np.argsort(losses.sum(axis=1), kind="stable"), []
    while len(left):  # nothing dominates the one with the least sum
        front.append(complete[left[0]])
        left = left[(losses[left] < losses[left[0]]).any(axis=1)]
    return sorted(front)


def _rank(trial: FrozenTrial, sign: int) -> tuple[float, ...]:
    """Return the order in which Optuna's TPE ranks ended trials, the best first."""
    if trial.state == TrialState.COMPLETE:
        assert trial.values is not None
        return 0, 0, sign * trial.values[0]
    if not trial.intermediate_values:
        return 1, 1, 0
    epoch, value = max(trial.intermediate_values.items())
    return 1, -epoch, math.inf if math.isnan(value) else sign * value
