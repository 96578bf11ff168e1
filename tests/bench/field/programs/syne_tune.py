"""Syne Tune's BOHB or ASHA with CQR, without its backend; it learns what was trained."""

from __future__ import annotations

import datetime
import logging
import math
from typing import Any

import numpy as np
from syne_tune import config_space as spaces
from syne_tune.backend.trial_status import Trial
from syne_tune.optimizer import baselines
from syne_tune.optimizer.scheduler import SchedulerDecision

from tests.bench.field.programs.serve import Job, Report, plain, serve


class Scheduler:
    """One of Syne Tune's schedulers; all of version 0.16 stop trainings, and resume none."""

    def __init__(self, problem: dict[str, Any]) -> None:
        logging.disable(logging.WARNING)
        np.random.seed(problem["seed"])
        self._epochs = problem["epochs"]
        make = getattr(baselines, problem["options"]["scheduler"])
        self._scheduler = make(
            {name: _domain(one) for name, one in problem["space"].items()},
            metric="loss",
            time_attr="epoch",
            max_t=self._epochs,
            grace_period=problem["grace"],
            reduction_factor=problem["reduction"],
            random_seed=problem["seed"],
        )
        self._trials: dict[str, Trial | None] = {}

    def ask(self) -> Job | None:
        suggestion = self._scheduler.suggest()
        if suggestion is None:
            return None
        name = str(len(self._trials))
        self._trials[name] = None
        chosen = {key: plain(value) for key, value in suggestion.config.items()}
        return Job(name, chosen, self._epochs)

    def tell(self, report: Report) -> bool:
        told = self._trials[report.trial]
        if told is None:
            told = Trial(int(report.trial), report.params, datetime.datetime.now())
            self._trials[report.trial] = told
            self._scheduler.on_trial_add(told)
        if not math.isfinite(report.loss):
            self._scheduler.on_trial_error(told)
            return False
        result = {"loss": report.loss, "epoch": report.epoch}
        decision = self._scheduler.on_trial_result(told, result)
        if report.last:
            self._scheduler.on_trial_complete(told, result)
        return bool(decision == SchedulerDecision.CONTINUE and not report.last)


def _domain(one: dict[str, Any]) -> Any:
    if one["kind"] == "choice":
        return spaces.choice(one["choices"])
    if one["kind"] == "int":
        return (spaces.lograndint if one["log"] else spaces.randint)(one["low"], one["high"])
    return (spaces.loguniform if one["log"] else spaces.uniform)(one["low"], one["high"])


if __name__ == "__main__":
    serve(Scheduler)
