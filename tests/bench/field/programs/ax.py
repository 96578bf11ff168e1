"""Ax's client with its rule that stops early; it learns the parameters that trained."""

from __future__ import annotations

import logging
import math
import warnings
from typing import Any

from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig
from ax.early_stopping.strategies import PercentileEarlyStoppingStrategy

from tests.bench.field.programs.serve import Job, Report, plain, serve


class Early:
    """Bayesian optimization over all trials, and a percentile rule that stops trainings.

    The rule is what Ax takes by default, but from the first rung on: its default of ten epochs is
    nearly a full training. It stops nothing before five trials are complete.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        self._epochs = problem["epochs"]
        self._client = Client(random_seed=problem["seed"])
        self._client.configure_experiment(
            [_parameter(name, one) for name, one in problem["space"].items()]
        )
        self._client.configure_optimization("-loss")
        self._client.configure_generation_strategy(initialization_random_seed=problem["seed"])
        self._client.set_early_stopping_strategy(
            PercentileEarlyStoppingStrategy(min_progression=problem["grace"])
        )
        self._indices: dict[str, int] = {}

    def ask(self) -> Job | None:
        for index, found in self._client.get_next_trials(max_trials=1).items():
            chosen = {name: plain(value) for name, value in found.items()}
            return Job(str(index), chosen, self._epochs)
        return None

    def tell(self, report: Report) -> bool:
        if report.trial not in self._indices:
            self._indices[report.trial] = self._replaced(int(report.trial), report.params)
        index = self._indices[report.trial]
        if not math.isfinite(report.loss):
            self._client.mark_trial_abandoned(index)
            return False
        self._client.attach_data(index, {"loss": report.loss}, progression=report.epoch)
        if report.last:
            self._client.complete_trial(index)
        elif self._client.should_stop_trial_early(index):
            self._client.mark_trial_early_stopped(index)
        else:
            return True
        return False

    def _replaced(self, index: int, params: dict[str, Any]) -> int:
        """Return the trial with the parameters that train, instead of the one that was asked."""
        arm = self._client._experiment.trials[index].arm
        if {name: plain(value) for name, value in arm.parameters.items()} == params:
            return index
        self._client.mark_trial_abandoned(index)
        return int(self._client.attach_trial(params))


def _parameter(name: str, one: dict[str, Any]) -> Any:
    if one["kind"] == "choice":
        kind = "str" if isinstance(one["choices"][0], str) else "float"
        return ChoiceParameterConfig(name=name, values=one["choices"], parameter_type=kind)
    return RangeParameterConfig(
        name=name,
        bounds=(one["low"], one["high"]),
        parameter_type=one["kind"],
        scaling="log" if one["log"] else "linear",
    )


if __name__ == "__main__":
    serve(Early)
