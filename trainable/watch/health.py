"""Health warnings about a run: a name and a sentence that says what to do.

Each function takes a history of plain numbers, oldest first, and returns a `Signal` or None.
Thresholds are defined here, with their reasons. A signal never changes the training. What must
not live here: torch, files, or where the numbers come from.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainable.store.metrics_file import Row

LATEST = 20
"""Number of steps that messages call "the last steps"."""
HIGH_NORM = 100.0
"""Gradient norms above this are spikes in any model; normal ones lie between 0.1 and 10."""
_MIN_SPIKES = 3
"""A signal needs this many spikes among the last steps; a single one may be chance."""


class Signal(NamedTuple):
    """A health warning: a short, stable name (for tags and filters), and what to do about it."""

    name: str
    sentence: str


def loss_not_finite(losses: Sequence[float], what: str = "loss") -> Signal | None:
    """Warn when the latest loss is NaN or infinite."""
    if not losses or math.isfinite(losses[-1]):
        return None
    return Signal(
        "loss_not_finite",
        f"{what} is {losses[-1]}: lower the learning rate, lengthen the warmup or lower max_norm",
    )


def loss_spike(losses: Sequence[float], start: float = 0.0) -> Signal | None:
    """Warn when the loss jumped: compare medians of the last 5 steps and the 50 before.

    A loss that is still below a hundredth of `start` is converged, and its noise no jump.
    """
    finite = [value for value in losses if math.isfinite(value)]
    if len(finite) < 55:
        return None
    before, latest = finite[-55:-5], finite[-5:]
    # A single bad batch does not move a median; a diverging run does.
    middle, now = statistics.median(before), statistics.median(latest)
    scatter = statistics.median(abs(value - middle) for value in before)
    if now <= middle + 10 * scatter or now <= 1.5 * abs(middle) or now < 0.01 * abs(start):
        return None
    return Signal(
        "loss_spike",
        f"loss jumped from {middle:.3g} to {now:.3g} within 5 steps: lower the learning rate or "
        "max_norm, or lengthen the warmup",
    )


def loss_plateau(losses: Sequence[float], start: float = math.inf) -> Signal | None:
    """Warn when the loss has not fallen for 200 steps.

    The means of the first and the second 100 steps are compared: the fall must be at most twice
    its standard error or at most 0.1 %, and by the same error surely less than a tenth, so that a
    noisy loss of which it is not known warns of nothing. A loss below a tenth of `start` has
    converged: no warning.
    """
    finite = [value for value in losses[-200:] if math.isfinite(value)]
    if len(finite) < 200:
        return None
    first, second = finite[:100], finite[100:]
    fall = statistics.fmean(first) - statistics.fmean(second)
    error = math.sqrt((statistics.pvariance(first) + statistics.pvariance(second)) / 100)
    level = abs(statistics.fmean(second))
    if fall > max(2 * error, 1e-3 * level) or fall + 2 * error >= 0.1 * level:
        return None
    if start < math.inf and level < 0.1 * abs(start):
        return None
    return Signal(
        "loss_plateau",
        f"loss has stayed near {statistics.fmean(second):.3g} for 200 steps: raise the learning "
        "rate, let it decay, or end the run here",
    )


def overfitting(
    train: Sequence[float], val: Sequence[float], patience: int = 3, word: str = "epoch"
) -> Signal | None:
    """Warn when validation loss rose for `patience` reports while training loss kept falling."""
    if min(len(train), len(val)) <= patience:
        return None
    train, val = train[-patience - 1 :], val[-patience - 1 :]
    if not all(map(math.isfinite, (*train, *val))):
        return None
    rising = all(later > earlier for earlier, later in itertools.pairwise(val))
    if not rising or train[-1] >= train[0] or val[-1] < 1.02 * val[0]:
        return None
    return Signal(
        "overfitting",
        f"val/loss rose from {val[0]:.3g} to {val[-1]:.3g} over {patience} {word}s while "
        f"train/loss fell to {train[-1]:.3g}: stop earlier, or add weight decay, dropout or data",
    )


def norm_spikes(norms: Sequence[float]) -> Signal | None:
    """Warn when several of the last gradient norms exceed 100."""
    latest = norms[-LATEST:]
    high = sum(value > HIGH_NORM for value in latest)
    if high < _MIN_SPIKES:
        return None
    return Signal(
        "norm_spikes",
        f"gradient norm above {HIGH_NORM:g} in {high} of the last {len(latest)} steps: lower the "
        "learning rate or max_norm",
    )


def norm_collapse(norms: Sequence[float]) -> Signal | None:
    """Warn when gradient norms vanish: below a millionth of their median, or below 1e-8."""
    if len(norms) < LATEST:
        return None
    highest, usual = max(norms[-LATEST:]), statistics.median(norms)
    if not highest < max(1e-8, 1e-6 * usual):
        return None
    return Signal(
        "norm_collapse",
        f"gradient norm below {max(highest, 1e-12):.1g} in all of the last {LATEST} steps: check "
        "for dead ReLUs, a saturated loss or frozen parameters",
    )


def lr_stuck(scheduled: Sequence[float], applied: Sequence[float]) -> Signal | None:
    """Warn when the applied learning rate stays constant while the schedule's changes."""
    wanted, used = scheduled[-LATEST:], applied[-LATEST:]
    if len(wanted) < LATEST or len(used) < LATEST or len(set(used)) > 1:
        return None
    # A thousandth: the last steps of a cosine schedule change by less.
    if max(abs(value - used[-1]) for value in wanted) <= 1e-3 * max(abs(used[-1]), *wanted):
        return None
    return Signal(
        "lr_stuck",
        f"learning rate was {used[-1]:.3g} in all of the last {LATEST} steps, the schedule asks "
        f"for {wanted[-1]:.3g}: something else writes the optimizer's lr",
    )


def device_under_used(percentages: Sequence[float]) -> Signal | None:
    """Warn when the device computes for less than half the training time (median of 3 epochs)."""
    if len(percentages) < 3:
        return None
    usual = statistics.median(percentages[-3:])
    if usual >= 50:
        return None
    return Signal(
        "device_under_used",
        f"the device computed for {usual:.0f} % of the training time: raise loader.num_workers or "
        "batch_size, or let more trials share a GPU",
    )


def gpu_under_used(
    busy: Sequence[float], memory: Sequence[float], share: float = 1.0
) -> Signal | None:
    """Warn when a GPU is busy for less than half the time, and say which share would fill it.

    `busy` has the percentages of time of each report, at least 3, and `memory` those of the GPU's
    memory that one process has; `share` is the share of the GPU that it asked for.
    """
    if len(busy) < 3 or (usual := statistics.median(busy)) >= 50:
        return None
    together = max(1, round(1 / share))
    more = int(together * _FILLED / max(usual, 1.0))
    if memory:
        more = min(more, int(_FILLED / max(*memory, 1.0)))
    said = f"GPU utilisation {usual:.0f} % in the median"
    if more <= together:
        return Signal("gpu_under_used", f"{said}: raise loader.num_workers or batch_size")
    part = math.floor(100 / more) / 100
    return Signal(
        "gpu_under_used",
        f"{said}: resources: {{gpu: {part:g}}} would train {more} trials on it at a time",
    )


_FILLED = 90.0
"""The percentage of a GPU's time, or memory, that trials together may take by the advice."""


def gpu_share_exceeded(memory: Sequence[float], share: float = 1.0) -> Signal | None:
    """Warn when a process has more of a GPU's memory (in percent) than its share below 1."""
    if share >= 1 or not memory or (most := max(memory)) <= 100 * share:
        return None
    return Signal(
        "gpu_share_exceeded",
        f"it has {most:.0f} % of the GPU's memory, and its share is {100 * share:.0f} %, so that "
        f"another trial may run out of memory: write resources: {{gpu: {math.ceil(most) / 100:g}}}"
        ", or lower batch_size",
    )


def memory_growing(sizes: Sequence[float], what: str = "memory") -> Signal | None:
    """Warn when memory (MiB) grows in most samples and by a tenth in all."""
    settled = sizes[len(sizes) // 4 :]  # in the first quarter caches fill and kernels load
    if len(settled) < 8:
        return None
    steps = [later - earlier for earlier, later in itertools.pairwise(settled)]
    grew = sum(step > 0 for step in steps) / len(steps)
    if grew < 0.75 or min(steps) < -0.02 * settled[0] or settled[-1] < 1.1 * settled[0]:
        return None
    return Signal(
        "memory_growing",
        f"{what} grew from {settled[0]:,.0f} to {settled[-1]:,.0f} MiB and did not stop: check "
        "for tensors kept from step to step, such as a loss without .item()",
    )


def throughput_dropping(rates: Sequence[float]) -> Signal | None:
    """Warn when each of the last 3 epochs ran at less than 60 % of the run's median speed."""
    positive = [rate for rate in rates if rate > 0]
    if len(positive) < 6:
        return None
    # The best of three: a single epoch may be slow during another job on the machine.
    usual, latest = statistics.median(positive[:-3]), max(positive[-3:])
    if latest >= 0.6 * usual:
        return None
    return Signal(
        "throughput_dropping",
        f"throughput fell from {usual:,.0f} to {latest:,.0f} samples per second: check the data "
        "source and other processes on this machine",
    )


class HealthMonitor:
    """Collect the rows of one run in bounded memory, and derive the signals.

    Memory is also sampled between rows. Its samples are never loaded from an interrupted run's
    rows: those describe another process.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._loss: deque[float] = deque(maxlen=200)
        self._norm: deque[float] = deque(maxlen=1000)
        self._train: deque[float] = deque(maxlen=50)
        self._val: deque[float] = deque(maxlen=50)
        self._rate: deque[float] = deque(maxlen=50)
        self._busy: deque[float] = deque(maxlen=50)
        self._gpu_busy: deque[float] = deque(maxlen=50)
        self._gpu_memory: deque[float] = deque(maxlen=50)
        self.gpu_share = 1.0
        """The share of a GPU that the run asked for."""
        self._memory: dict[str, deque[float]] = {}
        self._applied: deque[float] = deque(maxlen=LATEST)
        self._scheduled: deque[float] = deque(maxlen=LATEST)
        self._losses_since_report: list[float] = []
        self._word = "epoch"
        """What messages call a report."""

    def load_history(self, rows: Iterable[Row]) -> None:
        """Observe the rows that the run wrote before it was interrupted."""
        for row in rows:
            self.observe(row)

    def sample(self, memory: Mapping[str, float]) -> None:
        """Record the memory in use now, in MiB by metric name."""
        for name, size in memory.items():
            self._memory.setdefault(name, deque(maxlen=200)).append(size)

    def observe(self, row: Row, scheduled: float | None = None) -> None:
        """Record a row."""
        metrics = row.metrics
        if "train/loss" in metrics:
            self._loss.append(metrics["train/loss"])
            if len(self._first) < LATEST:
                self._first.append(metrics["train/loss"])
            self._losses_since_report.append(metrics["train/loss"])
        if "train/grad_norm" in metrics:
            self._norm.append(metrics["train/grad_norm"])
        if scheduled is not None and "train/lr" in metrics:
            self._applied.append(metrics["train/lr"])
            self._scheduled.append(scheduled)
        if "train/samples_per_second" in metrics:
            self._rate.append(metrics["train/samples_per_second"])
        if metrics.get("train/seconds", 0) > 0 and "train/device_seconds" in metrics:
            self._busy.append(100 * metrics["train/device_seconds"] / metrics["train/seconds"])
        if "gpu/utilization_percent" in metrics:
            self._gpu_busy.append(metrics["gpu/utilization_percent"])
        if "gpu/memory_percent" in metrics:
            self._gpu_memory.append(metrics["gpu/memory_percent"])
        if "report" in metrics:
            self._word = "report"
        if "val/loss" in metrics:
            self._val.append(metrics["val/loss"])
            if self._losses_since_report:
                self._train.append(statistics.fmean(self._losses_since_report))
            self._losses_since_report = []

    def signals(self) -> list[Signal]:
        """Return all present warnings."""
        start = statistics.fmean(self._first) if self._first else math.inf
        found = (
            loss_not_finite(self._loss, "train/loss"),
            loss_not_finite(self._val, "val/loss"),
            loss_spike(list(self._loss), start if math.isfinite(start) else 0.0),
            loss_plateau(list(self._loss), start),
            overfitting(list(self._train), list(self._val), word=self._word),
            norm_spikes(list(self._norm)),
            norm_collapse(list(self._norm)),
            lr_stuck(list(self._scheduled), list(self._applied)),
            throughput_dropping(list(self._rate)),
            device_under_used(list(self._busy)),
            gpu_under_used(self._gpu_busy, self._gpu_memory, self.gpu_share),
            gpu_share_exceeded(self._gpu_memory, self.gpu_share),
            *(memory_growing(list(sizes), name) for name, sizes in self._memory.items()),
        )
        return [signal for signal in found if signal is not None]

    def sentences(self) -> list[str]:
        """Return the sentences of `signals()`."""
        return [signal.sentence for signal in self.signals()]
