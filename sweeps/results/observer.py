"""What is told of a running sweep to whoever shows it.

What must not live here: showing it (`commands`), and anything a sweep needs to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from sweeps.paths import SweepPaths


class TrialProgress(NamedTuple):
    """What a view is told of a trial."""

    number: int
    params: Mapping[str, Any]
    epoch: int
    step: int
    metrics: Mapping[str, float]


class ProgressObserver(Protocol):
    """Where a running sweep is shown."""

    def started(self, number: int, params: Mapping[str, Any], attempt: int) -> None:
        """A trial began, or began again."""

    def reported(self, progress: TrialProgress) -> None:
        """A trial reached a report boundary."""

    def paused(self, number: int, value: float | None) -> None:
        """A trial waits at a rung."""

    def promoted(self, number: int) -> None:
        """A paused trial goes on."""

    def warned(self, number: int, sentence: str) -> None:
        """Something about a trial that its user should know and need not act on."""

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        """A trial has its end, or was interrupted (`state` is then `interrupted`)."""


class ShutdownNotices:
    """Receives what a driver has to say while it shuts down early; says nothing by itself."""

    def stopping(self, grace: float) -> None:
        """The first signal came: trials save and end within `grace` seconds."""

    def exited_immediately(self, paths: SweepPaths) -> None:
        """A second signal came: the process exits right after this call."""

    def cluster_lost(self, paths: SweepPaths, cause: str) -> None:
        """The Ray cluster is gone: the process exits right after this call."""
