"""When a run evaluates and reports, and when it ends: its budget on the data of its task.

A run's position is counted in whole windows or samples, so that a report falls on the same step
however often the run is interrupted. What must not live here: how a run evaluates (`loop.py`), and
the keys of the budget (`config.py`).
"""

from __future__ import annotations

import math
from fractions import Fraction

from trainable.config import BudgetConfig
from trainable.data import WindowPlan
from trainable.errors import ConfigError
from trainable.schedule import Schedule
from trainable.streams import Plan
from trainable.train_state import TrainProgress


class ReportPlan:
    """The reports of a run.

    Every trial of a sweep has as many reports, whatever its batch size. At least one window lies
    between two of them.
    """

    def __init__(
        self, budget: BudgetConfig, train: Plan, tokens_per_sample: int | None = None
    ) -> None:
        _check_length(budget, train)
        self.reports = budget.reports
        self.most: int | None = None
        """Windows before each report of a rehearsal; None: as the budget says."""
        self._budget, self._train = budget, train
        self._scale = _scale(budget, train, tokens_per_sample)
        self._target_of: tuple[int, Fraction] = (-1, Fraction(0))
        self._check()

    @property
    def total_steps(self) -> int:
        """Windows of a full run."""
        end = math.ceil(self._target(self.reports))
        if self._budget.unit in ("epochs", "steps"):
            return end
        epochs, rest = divmod(end, self._samples_per_epoch) if self._train.windows else (0, end)
        return epochs * self._train.windows + math.ceil(rest / self._window_size)

    @property
    def windows_per_report(self) -> int:
        """Windows from one report to the next, rounded up."""
        first = math.ceil(self._target(1))
        if self._budget.unit in ("epochs", "steps"):
            return first
        return math.ceil(first / self._window_size)

    def is_due(self, progress: TrainProgress) -> bool:
        """Return whether a report follows the window just trained."""
        if self.most is not None:
            return progress.since_report >= self.most
        known, target = self._target_of
        if known != progress.reports:
            target = self._target(progress.reports + 1)
            self._target_of = (progress.reports, target)
        return progress.since_report > 0 and self._position(progress) >= target

    def check_epoch(self, progress: TrainProgress, schedule: Schedule) -> None:
        """Refuse an epoch of a data set that has grown, where the schedule ends before the run."""
        train, epoch = self._train, progress.epoch
        now, grown = train.num_windows(epoch), progress.epoch_samples > train.num_built
        if (
            self._budget.unit == "epochs"
            and schedule.needs_length
            and grown
            and now > train.windows
        ):
            raise ConfigError(
                f"{schedule.name}, which is made for {self.total_steps} steps, and the run has "
                f"more: train has grown from {train.num_built} to {progress.epoch_samples} "
                f"samples, and epoch {epoch + 1} has {now} steps instead of {train.windows}; a "
                "schedule needs to know how many steps there are; write such as budget: "
                f"{{steps: {self.total_steps}, report_every: {train.windows}}}, or "
                "train.schedule.name: constant",
                key="train.schedule.name",
            )

    def numbers(self, progress: TrainProgress) -> dict[str, float]:
        """Return what a report's row tells of its place: the epoch, and the report's number.

        The number is left out where each epoch ends with a report: the two are then equal.
        """
        if self._budget.report_word == "epoch":
            return {"epoch": float(progress.epoch)}
        part = min(progress.window / (self._windows_now(progress) or math.inf), 1.0)
        return {"epoch": progress.epoch + part, "report": float(progress.reports)}

    def _position(self, progress: TrainProgress) -> Fraction | int:
        """Return how far a run is: in windows, or in samples."""
        if self._budget.unit == "epochs":
            # in windows of the first epoch; any other counts as long, and is over at its end
            first, now = self._train.windows, self._windows_now(progress)
            part = Fraction(progress.window * first, now)
            return progress.epoch * first + (part if part < first else first - 1)
        if self._budget.unit == "steps":
            return progress.step + progress.skipped
        return progress.samples

    def _windows_now(self, progress: TrainProgress) -> int:
        """Return the windows of the present epoch; those of the first where a stream has none."""
        known = self._train.num_windows(progress.epoch) if progress.window else 0
        return known or self._train.windows

    def _target(self, report: int) -> Fraction:
        """Return the position of a report, counted from 1."""
        at = min(report * self._budget.interval, Fraction(self._budget.total))
        return at * self._scale

    @property
    def _samples_per_epoch(self) -> int:
        train = self._train
        if isinstance(train, WindowPlan):
            return (train.windows - 1) * train.batch_size + train.size(train.windows - 1)
        return train.samples

    @property
    def _window_size(self) -> float:
        """Samples of a window: of most of them, or on average where the task decides it."""
        train = self._train
        return (
            train.batch_size
            if train.batch_size > 1
            else max(1, train.samples) / max(1, train.windows)
        )

    def _check(self) -> None:
        """Refuse reports that are closer than one window."""
        unit, every = self._budget.unit, self._budget.interval
        if unit == "epochs" and every * self._scale < 1:
            raise ConfigError(
                f"{float(every):g} of an epoch, and an epoch has {self._train.windows} steps; a "
                f"report comes after one step or more; write {1 / self._train.windows:.3g} or "
                "more, or lower train.batch_size",
                key="budget.report_every",
            )
        if unit in ("samples", "tokens") and every * self._scale < self._train.batch_size:
            least = math.ceil(self._train.batch_size / self._scale)
            raise ConfigError(
                f"{every} {unit}, and a step has {least}; a report comes after one step or more; "
                f"write {least} or more, or lower train.batch_size",
                key="budget.report_every",
            )


def _check_length(budget: BudgetConfig, train: Plan) -> None:
    """Refuse a budget in epochs, or in samples, whose steps a stream does not tell."""
    unit = budget.unit
    tells_samples = train.samples > 0 or train.batch_size > 1
    if train.windows > 0 if unit == "epochs" else unit == "steps" or tells_samples:
        return
    what = "length" if unit == "epochs" else "number of samples"
    raise ConfigError(
        f"{budget.total}, and train is a stream that does not tell its {what}; the schedule and "
        "the early stopping need to know how many steps a run has; write "
        "budget: {steps: 20000, report_every: 500}, or let the stream tell it by __len__()",
        key=f"budget.{unit}",
    )


def _scale(budget: BudgetConfig, train: Plan, tokens_per_sample: int | None) -> Fraction:
    """Return the windows or samples of one unit of the budget."""
    if budget.unit == "epochs":
        return Fraction(train.windows)
    if budget.unit != "tokens":
        return Fraction(1)
    if not isinstance(tokens_per_sample, int) or tokens_per_sample < 1:
        raise ConfigError(
            "the budget is in tokens, and the task does not say how many a sample has; give the "
            "task an attribute `tokens_per_sample`, a whole number from 1 on, or write a budget "
            "in samples",
            key="budget.tokens",
        )
    return Fraction(1, tokens_per_sample)
