"""Trials in memory that a `Suggester` learns from, for tests that need no ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.ledger import Suggestion
from sweeps.ledger.warm_start import WarmStart
from sweeps.optuna_compat.storage import set_trial_id
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec

Ended = Callable[[dict[str, Any]], float | str]
"""Returns the loss of parameters after one epoch, or why a trial with them fails."""


class MadeHistory:
    """A sweep's trials, each of which has ended.

    Args:
        spec: The sweep, with one metric.
    """

    def __init__(self, spec: SweepSpec) -> None:
        self.warm_start = WarmStart([])
        self.earlier_budgets: tuple[int, ...] = ()
        self.minimize = spec.modes[0] == "min"
        ways = {"min": StudyDirection.MINIMIZE, "max": StudyDirection.MAXIMIZE}
        self.directions = [ways[mode] for mode in spec.modes]
        self._trials: list[FrozenTrial] = []
        self._space = {key: one.to_optuna() for key, one in spec.search_space().ordered()}

    def frozen_trials(self) -> list[FrozenTrial]:
        """Return all trials."""
        return self._trials

    def end(self, suggestion: Suggestion, ended: float | list[float] | str) -> None:
        """Add a trial that is complete with a loss or values, or failed for a reason."""
        failed = isinstance(ended, str)
        values = [] if failed else ended if isinstance(ended, list) else [ended]
        trial = create_trial(
            state=TrialState.FAIL if failed else TrialState.COMPLETE,
            values=values or None,
            params=dict(suggestion.params),
            distributions={key: self._space[key] for key in suggestion.params},
            intermediate_values={1: values[0]} if len(values) == 1 else {},
            user_attrs={"reason": ended} if failed else {},
            system_attrs=dict(suggestion.system_attrs),
        )
        trial.number = len(self._trials)
        set_trial_id(trial, trial.number + 1)
        self._trials.append(trial)


def search(spec: SweepSpec, count: int, ended: Ended) -> list[dict[str, Any]]:
    """Run a search one trial after the other, and return the suggested parameters."""
    history = MadeHistory(spec)
    suggester = Suggester(spec, history)
    for number in range(count):
        suggestion = suggester.propose(number)
        history.end(suggestion, ended(suggestion.params))
    return [trial.params for trial in history.frozen_trials()]
