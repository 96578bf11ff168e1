"""A sweep without training, decided by a scheduler that replays the past."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import TrialScheduler

from sweeps.config.spec import EarlyStoppingConfig
from sweeps.early_stopping.schedulers import replay, stopped_trials

EPOCHS = 9


class SimulatedSweep:
    """A sweep that trains one trial at a time and keeps reports alone when its driver dies.

    Args:
        config: The stopping rule.
        mode: Whether less or more is better.
        curves: The metric after each epoch, of each trial.
    """

    def __init__(self, config: EarlyStoppingConfig, mode: Any, curves: list[list[float]]) -> None:
        self.config, self.mode, self.curves = config, mode, curves
        self.reports: dict[int, dict[int, float]] = {}
        self.unfinished: set[int] = set()

    def run(self, *, dies_after: int) -> None:
        """Run to the end, or die right after a report.

        Args:
            dies_after: How many reports are followed by a decision; a negative number: all.
        """
        judge = self._fresh()
        self.unfinished -= stopped_trials(judge, self.reports, self.unfinished)
        scheduler = self._fresh()
        for number in sorted(self.reports.keys() - self.unfinished):
            past = self.reports[number]
            replay(scheduler, f"past-{number}", past, number=number, finished=True)
        for number, curve in enumerate(self.curves):
            if number in self.reports and number not in self.unfinished:
                continue
            trial = SimpleNamespace(trial_id=f"now-{number}", config={"number": number})
            past = self.reports.setdefault(number, {})
            self.unfinished.add(number)
            if past:
                replay(scheduler, trial.trial_id, past, number=number, finished=False)
            scheduler.on_trial_add(None, trial)
            for epoch in range(max(past, default=0) + 1, EPOCHS + 1):
                past[epoch] = curve[epoch - 1]
                if dies_after == 0:
                    return
                dies_after -= 1
                result = {"epoch": epoch, "objective": past[epoch]}
                if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                    break
            last = {"epoch": max(past), "objective": past[max(past)]}
            scheduler.on_trial_complete(None, trial, last)
            self.unfinished.remove(number)

    def _fresh(self) -> Any:
        return self.config.rule.scheduler(epochs=EPOCHS, mode=self.mode)
