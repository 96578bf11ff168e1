"""StepRows: the rows of the steps of a run, from values on the device to the disk and the report.

Values stay on the device for some hundred steps and are then fetched in one transfer. What must
not live here: what a step computes (`step.py`), and when rows are due (`loop.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from trainable.diagnostics import LayerNorms
from trainable.health import HealthMonitor
from trainable.logged import Log
from trainable.metrics_file import History, Row
from trainable.optim import Scalar
from trainable.rank_values import means_of_ranks
from trainable.ranks import Ranks
from trainable.step import StepOutcome, raise_if_not_finite
from trainable.sums import Sums
from trainable.train_state import TrainState

# So a non-finite loss raises at most this many steps late; no parameter is changed in between.
_FETCH_EVERY = 512


class StepRows:
    """The rows of a run that are not yet reported."""

    def __init__(
        self,
        state: TrainState,
        history: History,
        log: Log,
        health: HealthMonitor,
        ranks: Ranks,
        earlier: Sequence[Row],
    ) -> None:
        self._state, self._ranks = state, ranks
        self._history, self._log, self._health = history, log, health
        self._logged: list[Row] = []
        self._pending: list[PendingStep] = []
        self._unwritten: list[Row] = []
        self._scheduled: dict[int, float] = {}
        self._unreported = [row for row in earlier if row.step > state.progress.reported_step]
        self.last_metrics = earlier[-1].metrics if earlier else {}
        """The metrics of the last step taken. They are needed at the epoch's end if fp16 has
        skipped all windows since a save."""

    def add(self, step: PendingStep) -> None:
        """Add a step, whose values may be on the device still; fetch many steps' at once."""
        self._pending.append(step)
        if len(self._pending) >= _FETCH_EVERY:
            self._fetch(self._ranks)

    def fetch(self) -> dict[str, float]:
        """Fetch the values of all steps and make rows of them; every rank calls this.

        Device synchronisation: one transfer, and where the task logs tensors one more.
        """
        (of_epoch,) = self._fetch(self._ranks, self._log.take_epoch())
        return of_epoch

    def write(self) -> None:
        """Write the rows that are made, and what the task has logged besides."""
        self._history.append(self._unwritten)
        logged = self._log.take_rows(self.last_metrics)
        self._history.append_logged(self._state.progress.step, logged)
        self._logged += logged
        for row in self._unwritten:
            self._health.observe(row, self._scheduled.pop(row.step, None))
        self._unreported += self._unwritten
        self._unwritten = []

    def fetch_and_write(self) -> None:
        """Write the rows of all steps; after an error those of the steps before it."""
        self._fetch_and_write(self._ranks)

    @contextlib.contextmanager
    def written_on_error(self) -> Iterator[None]:
        """On an error, write the rows of earlier steps first: they show what led to it."""
        try:
            yield
        except Exception:
            # after an error the ranks no longer act in step
            ranks = self._ranks if self._ranks.size == 1 else None
            with contextlib.suppress(RuntimeError):  # the device may no longer respond
                self._fetch_and_write(ranks)
            raise

    def end_report(self, found: dict[str, float], timestamp_ms: int) -> None:
        """Add the metrics of a report to the row of the last step."""
        self.last_metrics = self.last_metrics | found
        if self._unwritten:
            last = self._unwritten.pop()
            self._unwritten.append(last._replace(metrics=self.last_metrics))
        else:  # fp16 skipped every window since a save wrote the last row
            self._unwritten.append(Row(self._state.progress.step, timestamp_ms, found))

    def take(self) -> list[Row]:
        """Return the rows since the last report, once."""
        rows, self._logged, self._unreported = [*self._logged, *self._unreported], [], []
        return rows

    def _fetch(self, ranks: Ranks | None, *more: Sums) -> list[dict[str, float]]:
        """Make rows of all steps; return the means of `more`."""
        pending, self._pending = self._pending, []
        all_logged = means_of_ranks([*(entry.logged for entry in pending), *more], ranks)
        of_steps, of_more = all_logged[: len(pending)], all_logged[len(pending) :]
        values = fetch_values(pending)
        for entry, (loss, norm, clipped, weight), logged in zip(
            pending, values, of_steps, strict=True
        ):
            raise_if_not_finite(loss, norm, entry.step)
            metrics = {"train/loss": loss, "train/grad_norm": norm, "train/lr": entry.lr} | logged
            self._scheduled[entry.step] = entry.outcome.lr
            if entry.layers is not None:
                # Device synchronisation: one for each of the `layer_norms_every`-th steps.
                metrics |= LayerNorms.metrics(entry.layers, entry.outcome.norms.tolist(), weight)
            self._state.progress.clipped += bool(clipped)
            self._unwritten.append(Row(entry.step, entry.timestamp_ms, metrics))
            self.last_metrics = metrics
        return of_more

    def _fetch_and_write(self, ranks: Ranks | None) -> None:
        try:
            self._fetch(ranks)
        finally:
            self.write()


class PendingStep(NamedTuple):
    """A step whose values may still be on the device."""

    step: int
    timestamp_ms: int
    outcome: StepOutcome
    lr: float
    layers: list[str] | None
    logged: Sums


def fetch_values(pending: list[PendingStep]) -> list[tuple[float, ...]]:
    """Return loss, gradient norm, whether clipped, and weight of each step."""
    rows = [(o.loss, o.grad_norm, o.clipped, o.weight) for _, _, o, *_ in pending]
    if not any(isinstance(value, Tensor) for row in rows[:1] for value in row):
        return [tuple(map(float, row)) for row in rows]
    columns = [_column(values) for values in zip(*rows, strict=True)]
    fetched = torch.stack(columns).tolist()  # device synchronisation: one for all these steps
    return list(zip(*fetched, strict=True))


def _column(values: Sequence[Scalar | bool]) -> Tensor:
    """Stack one value of many steps, on the device where it was computed."""
    return torch.stack([v for v in values if isinstance(v, Tensor)]).double()
