"""SMAC3's multi-fidelity facade by its ask and tell, at the end of each budget."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from smac import MultiFidelityFacade, Scenario
from smac.runhistory.dataclasses import TrialInfo, TrialValue

from tests.bench.field.programs.serve import Job, Report, Worst, key, rounded, serve
from tests.bench.field.programs.spaces import config_space, params

_TRIALS = 6
"""For each full training of the budget."""
_INITIAL = 0.25
"""Of these, as is its default."""
_WITHOUT_END = 100_000


class Facade:
    """SMAC with random forests and Hyperband.

    Its initial design is that of six trials for each full training of the budget, which is about
    how many Hyperband starts. It goes on after them, as the search is longer than the budget.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        logging.getLogger("smac").setLevel(logging.ERROR)
        self._epochs = problem["epochs"]
        self._directory = tempfile.TemporaryDirectory()
        scenario = Scenario(
            config_space(problem),
            deterministic=True,
            min_budget=problem["grace"],
            max_budget=self._epochs,
            n_trials=_WITHOUT_END,
            seed=problem["seed"],
            output_directory=Path(self._directory.name),
        )
        self._smac = MultiFidelityFacade(
            scenario,
            _never_called,
            initial_design=MultiFidelityFacade.get_initial_design(
                scenario, n_configs=int(_INITIAL * _TRIALS * problem["budget"] / self._epochs)
            ),
            intensifier=MultiFidelityFacade.get_intensifier(scenario, eta=problem["reduction"]),
            overwrite=True,
            logging_level=logging.ERROR,
        )
        self._asked: dict[str, list[TrialInfo]] = {}
        self._loss = Worst()

    def ask(self) -> Job | None:
        try:
            info = self._smac.ask()
        except StopIteration:
            return None
        chosen = params(info.config)
        self._asked.setdefault(key(chosen), []).append(info)
        return Job(key(chosen), chosen, rounded(info.budget, self._epochs))

    def tell(self, report: Report) -> bool:
        told = self._loss(report.loss)
        if not report.last:
            return True
        self._smac.tell(self._asked[report.trial].pop(0), TrialValue(cost=told), save=False)
        return False


def _never_called(config: Any, seed: int = 0, budget: float = 0.0) -> float:
    """Have the arguments that SMAC looks for."""
    raise AssertionError(config, seed, budget)


if __name__ == "__main__":
    serve(Facade)
