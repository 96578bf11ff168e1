"""The protocol by which a driver reports the progress of its trials to a display.

What must not live here: a display (`cli`), and anything a sweep needs to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from sweeps.ledger.attributes import Role
from sweeps.paths import SweepPaths


class TrialStart(NamedTuple):
    """One start of a trial."""

    number: int
    params: Mapping[str, Any]
    attempt: int = 1
    role: Role = "search"
    origin: int | None = None
    step: int | None = None
    """Of the checkpoint from which it resumes, 0 without one; None at its first start."""


class TrialProgress(NamedTuple):
    """One report of a trial."""

    number: int
    params: Mapping[str, Any]
    epoch: int
    step: int
    metrics: Mapping[str, float]


class ProgressObserver(Protocol):
    """Receives the events of a running sweep, to show them."""

    def started(self, start: TrialStart) -> None:
        """A trial started, or restarted."""

    def reported(self, progress: TrialProgress) -> None:
        """A trial reported metrics."""

    def paused(self, number: int, value: float | None) -> None:
        """A trial waits at a rung."""

    def promoted(self, number: int) -> None:
        """A paused trial resumes."""

    def warned(self, number: int, sentence: str) -> None:
        """A trial has a warning that needs no action."""

    def stopping(self) -> None:
        """The sweep ends without its remaining trials; may be called repeatedly."""

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        """A trial ended, or was interrupted (`state` is then `interrupted`)."""


class ShutdownNotices:
    """Receives a driver's messages for the user during an early shutdown; prints none itself."""

    def stopping(self, grace: float) -> None:
        """The first signal arrived: trials save and end within `grace` seconds."""

    def exited_immediately(self, paths: SweepPaths) -> None:
        """The second signal arrived: the process exits right after this call."""

    def ray_lost(self, paths: SweepPaths, cause: str) -> None:
        """The local Ray or the cluster is lost: the process exits right after this call."""
