"""A sweep without training, decided by a scheduler that replays the past."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import TrialScheduler

from sweeps.ledger.trials import TrialRecord
from sweeps.search.searcher import replayed_scheduler
from sweeps.spec.sections import EarlyStoppingConfig
from sweeps.spec.spec import parse_spec
from sweeps.stopping.metric_values import Value, all_values
from sweeps.stopping.rule import Standing
from sweeps.stopping.schedulers import WouldStop, make_verdict_fn

EPOCHS = 9


class SimulatedSweep:
    """A sweep whose trials report in a given order, and whose drivers may die at any report.

    Args:
        config: The stopping rule.
        mode: Whether less or more is better.
        curves: The metric after each epoch, of each trial; a tuple for several metrics.
        exempt: The trials that are exempt from early stopping.
        order: Which trial reports next, for each report; trials that have ended are passed over.
            None: one trial after the other.
    """

    def __init__(
        self,
        config: EarlyStoppingConfig,
        mode: Any,
        curves: Sequence[Sequence[Value]],
        exempt: frozenset[int] = frozenset(),
        order: Sequence[int] | None = None,
    ) -> None:
        metric, modes = "val/loss", mode
        if isinstance(mode, tuple):
            metric, modes = "[val/loss, val/accuracy]", list(mode)
        self.spec = parse_spec(
            f"{{name: s, task: digits, metric: {metric}, mode: {modes}, trials: {len(curves)}, "
            f"budget: {{epochs: {EPOCHS}}}}}",
            "s.yaml",
        ).model_copy(update={"early_stopping": config})
        self.curves, self.exempt = curves, exempt
        serial = [number for number in range(len(curves)) for _ in range(EPOCHS)]
        self._order = iter(serial if order is None else order)
        self.reports: dict[int, dict[int, Value]] = {}
        self.would_stop: dict[int, WouldStop] = {}
        """By exempt trial, where it would have been stopped, as a ledger keeps."""
        self._ended: set[int] = set()
        self._undecided: set[int] = set()
        """The trial whose last report the ledger did not know when its driver died."""

    def run(self, *, dies_after: int, decides: bool = False) -> None:
        """Run to the end, or die at a report.

        Args:
            dies_after: How many reports come before that one; a negative number: it does not die.
            decides: Whether it still decides on that report.
        """
        self._reconcile()
        scheduler = replayed_scheduler(self.spec, self._records(), lambda _: EPOCHS)
        for number in self._order:
            if number in self._ended:
                continue
            past = self.reports.setdefault(number, {})
            epoch = len(past) + 1
            past[epoch] = self.curves[number][epoch - 1]
            if dies_after == 0 and not decides:
                self._undecided = {number}
                return
            config = {"number": number, "exempt": number in self.exempt}
            trial, result = SimpleNamespace(config=config), _result(epoch, past[epoch])
            verdict = scheduler.on_trial_result(None, trial, result)
            if number in scheduler.would_stop:
                self.would_stop.setdefault(number, scheduler.would_stop[number])
            if verdict == TrialScheduler.STOP or epoch == EPOCHS:
                scheduler.on_trial_complete(None, trial, result)
                self._ended.add(number)
            if dies_after == 0:
                return
            dies_after -= 1

    def _reconcile(self) -> None:
        """Decide on the report that the last driver left undecided, as a resume does."""
        self._ended |= {number for number, past in self.reports.items() if len(past) == EPOCHS}
        known = {record.number: record.compared_reports for record in self._records()}
        unfinished = self.reports.keys() - self._ended
        decided = unfinished - (self._undecided - self.would_stop.keys())
        verdict = make_verdict_fn(self.spec)(Standing(known, unfinished, decided, self.exempt))
        for number, why in verdict.items():
            if number in self.exempt:
                self.would_stop[number] = WouldStop(len(self.reports[number]), why)
            else:
                self._ended.add(number)
        self._undecided = set()

    def _records(self) -> list[TrialRecord]:
        return [self._record(number) for number in sorted(self.reports)]

    def _record(self, number: int) -> TrialRecord:
        at, why = self.would_stop.get(number, (None, None))
        past: Any = {epoch: all_values(value) for epoch, value in self.reports[number].items()}
        return TrialRecord(
            number=number,
            state="complete" if number in self._ended else "running",
            params={},
            value=None,
            exempt=number in self.exempt,
            would_stop_at=at,
            would_stop_reason=why,
            reports={epoch: values[0] for epoch, values in past.items()},
            all_reports=past if len(self.spec.metrics) > 1 else {},
        )


def _result(epoch: int, value: Value) -> dict[str, Any]:
    if isinstance(value, tuple):
        return {"epoch": epoch, "objective": value[0], "objectives": value}
    return {"epoch": epoch, "objective": value}
