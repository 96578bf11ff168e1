"""What a trial that was trained again has shown: whether it is the same, and what differs.

What must not live here: training it (`trust.reproduction`), and printing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from trainable.store.metrics_file import Row


@dataclass(frozen=True)
class StateCheck:
    """The comparison with one checkpoint of the trial.

    Attributes:
        checkpoint: The checkpoint's name.
        step: Its step.
        num_tensors: The tensors that were compared.
        num_differing: The entries that differ, tensors or not.
        first: The first of them, the weights before all others; None: all are equal.
        what: How it differs, in words.
        largest: The largest difference of two numbers in it; None where none can be told.
    """

    checkpoint: str
    step: int
    num_tensors: int = 0
    num_differing: int = 0
    first: str | None = None
    what: str | None = None
    largest: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the states are the same bit for bit."""
        return self.what is None


@dataclass(frozen=True)
class Reproduction:
    """What a trial trained again has shown.

    Attributes:
        trial: The trial's number.
        started_from: The step at which the new run began; 0: the beginning.
        end: The step to which the trial had trained.
        reached: The step that the new run has reached.
        num_rows: The rows of the curve that were compared.
        num_metrics: The different metrics in them.
        curve: The first value of the curve that differs.
        states: The comparisons with the trial's checkpoints, in the order of steps.
        not_compared: Why something that the trial should have was not compared, in sentences.
        notes: What else the reader should know, in sentences.
        machine: What is different about the machine.
        code: Source files of the task that have changed.
        built: What of the model and the data is built differently.
        failure: The error that ended the new run; None: none did.
    """

    trial: int
    started_from: int
    end: int
    reached: int = 0
    num_rows: int = 0
    num_metrics: int = 0
    curve: Difference | None = None
    states: Sequence[StateCheck] = ()
    not_compared: Sequence[str] = ()
    notes: Sequence[str] = ()
    machine: Sequence[MachineDifference] = ()
    code: Sequence[str] = ()
    built: Sequence[str] = ()
    failure: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether everything that the trial left is the same bit for bit, and something is."""
        wrong = self.curve or self.failure or self.not_compared or self.reached < self.end
        same = all(one.is_equal for one in self.states)
        return not wrong and same and bool(self.num_rows or self.states)

    @property
    def first_step(self) -> int | None:
        """The first step at which a difference shows; None without one."""
        found = [one.step for one in self.states if not one.is_equal]
        return min([*found, *([self.curve.step] if self.curve else [])], default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            **asdict(self),
            "is_equal": self.is_equal,
            "first_step": self.first_step,
            "curve": self.curve and self.curve._asdict(),
            "machine": [one._asdict() for one in self.machine],
        }


class Difference(NamedTuple):
    """The first value in which two runs differ; None stands for a metric that a run lacks."""

    step: int
    metric: str
    first: float | None
    second: float | None


def first_difference(
    first: Sequence[Row], second: Sequence[Row], *, ignored: Collection[str] = ()
) -> Difference | None:
    """Return the first difference of two runs, as far as both have trained; None without one."""
    from trainable.watch.diagnostics import MEASURED  # which imports torch

    end = min(rows[-1].step if rows else -1 for rows in (first, second))
    one, other = ({row.step: row.metrics for row in rows} for rows in (first, second))
    for step in sorted({*one, *other}):
        if step > end:
            break
        was, now = one.get(step, {}), other.get(step, {})
        for metric in sorted({*was, *now}):
            found = was.get(metric), now.get(metric)
            if metric not in MEASURED and metric not in ignored and not _same(*found):
                return Difference(step, metric, *found)
    return None


def first_logged_difference(
    first: Sequence[tuple[int, Row]], second: Sequence[tuple[int, Row]], *, until: int
) -> Difference | None:
    """Return the first difference of what the user's code logged under its own steps."""
    one, other = ([row for row in rows if row[0] <= until] for rows in (first, second))
    for index in range(max(len(one), len(other))):
        (at, was), (then, now) = (
            rows[index] if index < len(rows) else (0, Row(0, 0, {})) for rows in (one, other)
        )
        for metric in sorted({*was.metrics, *now.metrics}):
            found = was.metrics.get(metric), now.metrics.get(metric)
            if was.step != now.step or not _same(*found):
                return Difference(max(at, then), metric, *found)
    return None


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


_COMPARED = {
    "gradsweep.version.python": "python",
    "gradsweep.version.torch": "torch",
    "gradsweep.version.numpy": "numpy",
    "gradsweep.version.gradsweep": "gradsweep",
    "gradsweep.platform": "platform",
    "gradsweep.cpu": "cpu",
    "gradsweep.gpus": "gpus",
    "gradsweep.environment": "environment",
}
"""The tags that are compared, with their words."""


class MachineDifference(NamedTuple):
    """Something that was another one in the sweep.

    Attributes:
        what: What it is, such as `torch`.
        then: What it was; several, if it changed while the sweep ran.
        now: What it is here.
    """

    what: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.what} is {self.now} here and was {self.then} in the sweep"


def machine_differences(
    attempts: Sequence[Mapping[str, str]], now: Mapping[str, str]
) -> Iterator[MachineDifference]:
    """Yield what differs from the machines of a sweep's drivers.

    What no driver recorded is not compared.
    """
    for key, what in _COMPARED.items():
        then = {attempt[key] for attempt in attempts if key in attempt}
        if then and then != {now.get(key)}:
            yield MachineDifference(what, ", ".join(sorted(then)), now.get(key, "none"))
