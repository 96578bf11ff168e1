"""Health signals: what is wrong with a run, as a name and a plain sentence.

Each function looks at a history of plain numbers, oldest first, and returns a `Signal` or None.
Thresholds stand here, with their reasons; a signal is an opinion and never changes the training.
What must not live here: torch, files, or where the numbers come from.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from trainable.metrics_file import Row

LATEST = 20
"""Values that a sentence speaks of as "the last"."""
HIGH_NORM = 100.0
"""Gradient norms above this are spikes, whatever the model; healthy ones lie in 0.1 to 10."""
_FEW = 3
"""One spike is luck; persistent ones are a signal."""


class Signal(NamedTuple):
    """Something that deserves a look.

    Attributes:
        name: A short word, stable, for tags and filters.
        sentence: What was seen and what to do.
    """

    name: str
    sentence: str


def loss_not_finite(losses: Sequence[float], what: str = "loss") -> Signal | None:
    """The latest loss is NaN or infinite."""
    if not losses or math.isfinite(losses[-1]):
        return None
    return Signal(
        "loss_not_finite",
        f"{what} is {losses[-1]}: lower the learning rate, lengthen the warmup or lower max_norm",
    )


def loss_spike(losses: Sequence[float]) -> Signal | None:
    """The latest losses jumped far above those before.

    Compared are medians: of the last 5 with the 50 before, in units of the scatter of these 50.
    A single bad batch does not move a median; a run that has left its valley does.
    """
    finite = [value for value in losses if math.isfinite(value)]
    if len(finite) < 55:
        return None
    before, latest = finite[-55:-5], finite[-5:]
    middle, now = statistics.median(before), statistics.median(latest)
    scatter = statistics.median(abs(value - middle) for value in before)
    if now <= middle + 10 * scatter or now <= 1.5 * abs(middle):
        return None
    return Signal(
        "loss_spike",
        f"loss jumped from {middle:.3g} to {now:.3g} within 5 steps: lower the learning rate or "
        "max_norm, or lengthen the warmup",
    )


def loss_plateau(losses: Sequence[float], start: float = math.inf) -> Signal | None:
    """The loss has not fallen over a long stretch, and is not yet a tenth of what it was at first.

    Compared are the first and second half of the last 200 values; the fall of their means must
    exceed twice its own standard error, or else it is not told from noise, and 0.1 % of the loss.

    Args:
        losses: One value for each step.
        start: The loss of the first steps; a run that came far below it has converged.
    """
    finite = [value for value in losses[-200:] if math.isfinite(value)]
    if len(finite) < 200:
        return None
    first, second = finite[:100], finite[100:]
    fall = statistics.fmean(first) - statistics.fmean(second)
    error = math.sqrt((statistics.pvariance(first) + statistics.pvariance(second)) / 100)
    level = abs(statistics.fmean(second))
    if fall > max(2 * error, 1e-3 * level) or (start < math.inf and level < 0.1 * abs(start)):
        return None
    return Signal(
        "loss_plateau",
        f"loss has stayed near {statistics.fmean(second):.3g} for 200 steps: raise the learning "
        "rate, let it decay, or end the run here",
    )


def overfitting(train: Sequence[float], val: Sequence[float], patience: int = 3) -> Signal | None:
    """Validation loss has risen for `patience` epochs while training loss went on falling."""
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
        f"val/loss rose from {val[0]:.3g} to {val[-1]:.3g} over {patience} epochs while "
        f"train/loss fell to {train[-1]:.3g}: stop earlier, or add weight decay, dropout or data",
    )


def norm_spikes(norms: Sequence[float]) -> Signal | None:
    """Gradient norms keep exceeding 100."""
    latest = norms[-LATEST:]
    high = sum(value > HIGH_NORM for value in latest)
    if high < _FEW:
        return None
    return Signal(
        "norm_spikes",
        f"gradient norm above {HIGH_NORM:g} in {high} of the last {len(latest)} steps: lower the "
        "learning rate or max_norm",
    )


def norm_collapse(norms: Sequence[float]) -> Signal | None:
    """Gradient norms fell to nothing: below a millionth of what they were, or below 1e-8."""
    if len(norms) < LATEST:
        return None
    highest, usual = max(norms[-LATEST:]), statistics.median(norms)
    if not highest < max(1e-8, 1e-6 * usual):
        return None
    return Signal(
        "norm_collapse",
        f"gradient norm below {max(highest, 1e-12):.1g} in all of the last {LATEST} steps: look "
        "for dead ReLUs, a saturated loss or frozen parameters",
    )


def lr_stuck(scheduled: Sequence[float], applied: Sequence[float]) -> Signal | None:
    """The learning rate stayed where it was while the schedule moved."""
    wanted, used = scheduled[-LATEST:], applied[-LATEST:]
    if len(wanted) < LATEST or len(used) < LATEST or len(set(used)) > 1:
        return None
    # A thousandth: the last steps of a cosine move by less, and nobody would call them stuck.
    if max(abs(value - used[-1]) for value in wanted) <= 1e-3 * max(abs(used[-1]), *wanted):
        return None
    return Signal(
        "lr_stuck",
        f"learning rate was {used[-1]:.3g} in all of the last {LATEST} steps, the schedule asks "
        f"for {wanted[-1]:.3g}: something else writes the optimizer's lr",
    )


def device_under_used(percentages: Sequence[float]) -> Signal | None:
    """The device computed for less than half of the training time, by the median of 3 epochs."""
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


def memory_growing(sizes: Sequence[float], what: str = "memory") -> Signal | None:
    """Memory in MiB has grown from reading to reading, by a tenth in all, after it settled.

    The first quarter is left out: caches fill and kernels load then.
    """
    settled = sizes[len(sizes) // 4 :]
    if len(settled) < 8:
        return None
    steps = [later - earlier for earlier, later in itertools.pairwise(settled)]
    grew = sum(step > 0 for step in steps) / len(steps)
    if grew < 0.75 or min(steps) < -0.02 * settled[0] or settled[-1] < 1.1 * settled[0]:
        return None
    return Signal(
        "memory_growing",
        f"{what} grew from {settled[0]:,.0f} to {settled[-1]:,.0f} MiB and did not stop: look for "
        "tensors kept from step to step, such as a loss without .item()",
    )


def throughput_dropping(rates: Sequence[float]) -> Signal | None:
    """Each of the last 3 epochs ran at less than 60 % of the run's usual speed.

    One slow epoch, or a neighbour's short job, is no trend.
    """
    positive = [rate for rate in rates if rate > 0]
    if len(positive) < 6:
        return None
    usual, latest = statistics.median(positive[:-3]), max(positive[-3:])
    if latest >= 0.6 * usual:
        return None
    return Signal(
        "throughput_dropping",
        f"throughput fell from {usual:,.0f} to {latest:,.0f} samples per second: look at the data "
        "source and at what else runs on this machine",
    )


class HealthMonitor:
    """Looks at the rows of one run as they come, and keeps no more than it needs.

    Memory is also sampled between rows. Rows that an interrupted run had written do not count for
    it: they tell of another process.
    """

    def __init__(self) -> None:
        self._first: list[float] = []
        self._loss: deque[float] = deque(maxlen=200)
        self._norm: deque[float] = deque(maxlen=1000)
        self._train: deque[float] = deque(maxlen=50)
        self._val: deque[float] = deque(maxlen=50)
        self._rate: deque[float] = deque(maxlen=50)
        self._busy: deque[float] = deque(maxlen=50)
        self._memory: dict[str, deque[float]] = {}
        self._applied: deque[float] = deque(maxlen=LATEST)
        self._scheduled: deque[float] = deque(maxlen=LATEST)
        self._epoch_losses: list[float] = []

    def load_history(self, rows: Iterable[Row]) -> None:
        """See rows that an interrupted run had written."""
        for row in rows:
            self.observe(row)

    def sample(self, memory: Mapping[str, float]) -> None:
        """Take note of what the run holds now, in MiB by metric name."""
        for name, size in memory.items():
            self._memory.setdefault(name, deque(maxlen=200)).append(size)

    def observe(self, row: Row, scheduled: float | None = None) -> None:
        """Take note of a row.

        Args:
            row: In the order of steps.
            scheduled: The learning rate that the schedule asks for at this step, where known.
        """
        metrics = row.metrics
        if "train/loss" in metrics:
            self._loss.append(metrics["train/loss"])
            if len(self._first) < LATEST:
                self._first.append(metrics["train/loss"])
            self._epoch_losses.append(metrics["train/loss"])
        if "train/grad_norm" in metrics:
            self._norm.append(metrics["train/grad_norm"])
        if scheduled is not None and "train/lr" in metrics:
            self._applied.append(metrics["train/lr"])
            self._scheduled.append(scheduled)
        if "train/samples_per_second" in metrics:
            self._rate.append(metrics["train/samples_per_second"])
        if metrics.get("train/seconds", 0) > 0 and "train/device_seconds" in metrics:
            self._busy.append(100 * metrics["train/device_seconds"] / metrics["train/seconds"])
        if "val/loss" in metrics:
            self._val.append(metrics["val/loss"])
            if self._epoch_losses:
                self._train.append(statistics.fmean(self._epoch_losses))
            self._epoch_losses = []

    def signals(self) -> list[Signal]:
        """Return what deserves a look now."""
        start = statistics.fmean(self._first) if self._first else math.inf
        found = (
            loss_not_finite(self._loss, "train/loss"),
            loss_not_finite(self._val, "val/loss"),
            loss_spike(list(self._loss)),
            loss_plateau(list(self._loss), start),
            overfitting(list(self._train), list(self._val)),
            norm_spikes(list(self._norm)),
            norm_collapse(list(self._norm)),
            lr_stuck(list(self._scheduled), list(self._applied)),
            throughput_dropping(list(self._rate)),
            device_under_used(list(self._busy)),
            *(memory_growing(list(sizes), name) for name, sizes in self._memory.items()),
        )
        return [signal for signal in found if signal is not None]

    def sentences(self) -> list[str]:
        """Return the sentences of `signals()`."""
        return [signal.sentence for signal in self.signals()]
