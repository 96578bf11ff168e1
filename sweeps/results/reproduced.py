"""What a trial that was trained again has shown: whether it is the same, and what differs.

What must not live here: training it (`operations.reproduction`), and printing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeps.results.machine_differences import MachineDifference
from sweeps.results.same_curve import Difference


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
