"""NePS by its ask and tell, at the end of each budget; it learns the parameters that trained."""

from __future__ import annotations

import logging
import random
from typing import Any

import neps
import numpy as np
import torch

from tests.bench.field.programs.serve import Job, Report, Worst, plain, rounded, serve

_FIDELITY = "epoch"


class Brackets:
    """One of NePS' bracket algorithms; without priors, which nobody else has."""

    def __init__(self, problem: dict[str, Any]) -> None:
        logging.disable(logging.WARNING)
        random.seed(problem["seed"])
        np.random.seed(problem["seed"])
        torch.manual_seed(problem["seed"])
        self._epochs = problem["epochs"]
        space: dict[str, Any] = {n: _parameter(one) for n, one in problem["space"].items()}
        space[_FIDELITY] = neps.HPOInteger(problem["grace"], self._epochs, is_fidelity=True)
        make = getattr(neps.algorithms, problem["options"]["algorithm"])
        self._neps = neps.AskAndTell(make(neps.SearchSpace(space), eta=problem["reduction"]))
        self._asked: dict[str, Any] = {}
        self._loss = Worst()

    def ask(self) -> Job:
        trial = self._neps.ask()
        name = trial.id.partition("_")[0]
        self._asked[name] = trial
        chosen = {key: plain(value) for key, value in trial.config.items() if key != _FIDELITY}
        return Job(name, chosen, rounded(trial.config[_FIDELITY], self._epochs))

    def tell(self, report: Report) -> bool:
        told = self._loss(report.loss)
        if not report.last:
            return True
        asked = self._asked[report.trial]
        asked.config = {**report.params, _FIDELITY: asked.config[_FIDELITY]}
        self._neps.tell(asked.id, told)
        return False


def _parameter(one: dict[str, Any]) -> Any:
    if one["kind"] == "choice":
        return neps.HPOCategorical(one["choices"])
    kind = neps.HPOInteger if one["kind"] == "int" else neps.HPOFloat
    return kind(one["low"], one["high"], log=one["log"])


if __name__ == "__main__":
    serve(Brackets)
