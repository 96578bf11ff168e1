"""DEHB by its ask and tell; it learns the loss of what it asked for, at the end of each budget."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
from dehb import DEHB

from tests.bench.field.programs.serve import Job, Report, Worst, key, rounded, serve
from tests.bench.field.programs.spaces import config_space, params


class Evolution:
    """DEHB with as many workers as the problem has."""

    def __init__(self, problem: dict[str, Any]) -> None:
        np.random.seed(problem["seed"])
        self._epochs = problem["epochs"]
        self._directory = tempfile.TemporaryDirectory()
        space = config_space(problem)
        self._dehb = DEHB(
            cs=space,
            dimensions=len(problem["space"]),
            f=lambda *_: None,
            min_fidelity=problem["grace"],
            max_fidelity=self._epochs,
            eta=problem["reduction"],
            n_workers=1,  # of its own processes: it starts none
            seed=problem["seed"],
            output_path=self._directory.name,
            save_freq="end",
            log_level="ERROR",
        )
        self._asked: dict[str, list[dict[str, Any]]] = {}
        self._loss = Worst()

    def ask(self) -> Job:
        info = self._dehb.ask()
        chosen = params(info["config"])
        self._asked.setdefault(key(chosen), []).append(info)
        return Job(key(chosen), chosen, rounded(info["fidelity"], self._epochs))

    def tell(self, report: Report) -> bool:
        told = self._loss(report.loss)
        if not report.last:
            return True
        info = self._asked[report.trial].pop(0)
        self._dehb.tell(info, {"fitness": told, "cost": float(report.epoch)})
        return False


if __name__ == "__main__":
    serve(Evolution)
