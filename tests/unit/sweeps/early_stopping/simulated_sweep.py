"""A sweep without training, decided by a scheduler that replays the past."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import TrialScheduler

from sweeps.config.sections import EarlyStoppingConfig
from sweeps.early_stopping.metric_values import Value
from sweeps.early_stopping.schedulers import StopperScheduler, replay, stopped_trials

EPOCHS = 9


class SimulatedSweep:
    """A sweep that trains one trial at a time and keeps reports alone when its driver dies.

    Args:
        config: The stopping rule.
        mode: Whether less or more is better.
        curves: The metric after each epoch, of each trial; a tuple for several metrics.
        exempt: The trials that are exempt from early stopping.
    """

    def __init__(
        self,
        config: EarlyStoppingConfig,
        mode: Any,
        curves: Sequence[Sequence[Value]],
        exempt: frozenset[int] = frozenset(),
    ) -> None:
        self.config, self.mode, self.curves, self.exempt = config, mode, curves, exempt
        self.reports: dict[int, dict[int, Value]] = {}
        self.unfinished: set[int] = set()
        self.would_stop: dict[int, int] = {}
        """By exempt trial, the report at which it would have been stopped, as a ledger keeps."""

    def run(self, *, dies_after: int) -> None:
        """Run to the end, or die right after a report.

        Args:
            dies_after: How many reports are followed by a decision; a negative number: all.
        """
        judge = self._fresh()
        known = {number: self._compared(number) for number in self.reports}
        self.unfinished -= stopped_trials(judge, known, self.unfinished, self.exempt).keys()
        scheduler = self._fresh()
        for number in sorted(self.reports.keys() - self.unfinished):
            self._replay(scheduler, f"past-{number}", number, finished=True)
        for number, curve in enumerate(self.curves):
            if number in self.reports and number not in self.unfinished:
                continue
            config = {
                "number": number,
                "exempt": number in self.exempt,
                "would_stop_at": self.would_stop.get(number),
            }
            trial = SimpleNamespace(trial_id=f"now-{number}", config=config)
            past = self.reports.setdefault(number, {})
            self.unfinished.add(number)
            if past:
                self._replay(scheduler, trial.trial_id, number, finished=False)
            scheduler.on_trial_add(None, trial)
            for epoch in range(max(past, default=0) + 1, EPOCHS + 1):
                past[epoch] = curve[epoch - 1]
                if dies_after == 0:
                    return
                dies_after -= 1
                result = _result(epoch, past[epoch])
                if scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP:
                    break
                if number in scheduler.would_stop:
                    self.would_stop.setdefault(number, scheduler.would_stop[number].epoch)
            scheduler.on_trial_complete(None, trial, _result(max(past), past[max(past)]))
            self.unfinished.remove(number)

    def _compared(self, number: int) -> dict[int, Value]:
        end = self.would_stop.get(number, EPOCHS)
        return {epoch: one for epoch, one in self.reports[number].items() if epoch <= end}

    def _replay(self, scheduler: Any, trial_id: str, number: int, *, finished: bool) -> None:
        exempt, past = number in self.exempt, self._compared(number)
        replay(scheduler, trial_id, past, number=number, finished=finished, exempt=exempt)

    def _fresh(self) -> Any:
        modes = self.mode if isinstance(self.mode, tuple) else (self.mode,)
        lows: Any = tuple(mode == "min" for mode in modes)
        minimize = lows if len(lows) > 1 else lows[0]
        stopper = self.config.rule.make_stopper(epochs=EPOCHS, minimize=minimize)
        return StopperScheduler(stopper, self.config.scheduler, "val/loss")


def _result(epoch: int, value: Value) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"epoch": epoch, "objective": value[0], "objectives": value}
    return {"epoch": epoch, "objective": value}
