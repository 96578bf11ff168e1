"""Optuna's TPE with its Hyperband pruner, as its documentation shows them together."""

from __future__ import annotations

import math
from typing import Any

import optuna

from tests.bench.field.programs.serve import Job, Report, serve


class Study:
    """A study that is told what was trained in place of what it suggested."""

    def __init__(self, problem: dict[str, Any]) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._space = {name: _distribution(one) for name, one in problem["space"].items()}
        self._epochs = problem["epochs"]
        self._study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=problem["seed"]),
            pruner=optuna.pruners.HyperbandPruner(
                min_resource=problem["grace"],
                max_resource=self._epochs,
                reduction_factor=problem["reduction"],
            ),
        )
        self._trials: dict[str, optuna.Trial] = {}

    def ask(self) -> Job:
        trial = self._study.ask(self._space)
        self._trials[str(trial.number)] = trial
        return Job(str(trial.number), trial.params, self._epochs)

    def tell(self, report: Report) -> bool:
        told = self._trials[report.trial]
        if report.epoch == 1:
            self._replace(told, report.params)
        if not math.isfinite(report.loss):
            self._study.tell(told, state=optuna.trial.TrialState.FAIL)
            return False
        told.report(report.loss, report.epoch)
        if report.last:
            self._study.tell(told, report.loss)
        elif told.should_prune():
            self._study.tell(told, state=optuna.trial.TrialState.PRUNED)
        else:
            return True
        return False

    def _replace(self, trial: optuna.Trial, params: dict[str, Any]) -> None:
        storage = self._study._storage
        for name, one in self._space.items():
            stored = one.to_internal_repr(params[name])
            storage.set_trial_param(trial._trial_id, name, stored, one)


def _distribution(one: dict[str, Any]) -> optuna.distributions.BaseDistribution:
    if one["kind"] == "choice":
        return optuna.distributions.CategoricalDistribution(one["choices"])
    kinds: dict[str, Any] = {
        "float": optuna.distributions.FloatDistribution,
        "int": optuna.distributions.IntDistribution,
    }
    found: optuna.distributions.BaseDistribution = kinds[one["kind"]](
        one["low"], one["high"], log=one["log"]
    )
    return found


if __name__ == "__main__":
    serve(Study)
