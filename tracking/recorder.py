"""The `Recorder` protocol of six methods; `tracking.outbox_recorder` has the recorder of a sweep.

Callers depend on the protocol alone. What must not live here: MLflow, queues, anything beyond the
standard library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol, runtime_checkable

from tracking.metric_points import MetricRow

__all__ = [
    "TAG_REPEATS",
    "MetricRow",
    "Recorder",
    "Status",
    "check_artifact_name",
]

Status = Literal["FINISHED", "KILLED", "FAILED", "INTERRUPTED"]
"""How a run ends. INTERRUPTED means that it will resume; MLflow stores it as KILLED."""
CHANGED_PREFIX = "param_changed."
PARAM_PREFIX = "param/"
TAG_REPEATS = "gradsweep.repeats"
"""A tag of a trial's run at its start: the number of the trial below whose run it is shown."""


@runtime_checkable
class Recorder(Protocol):
    """Records a sweep and its trials; a trial of `None` means the sweep's own run."""

    def start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Create a trial's run, or reopen it.

        The first value of a parameter stays. A later value becomes the tag `param_changed.<key>`.
        If it is a number, it also becomes a point of the metric `param/<key>`, at the last step
        recorded so far.

        Args:
            at_ms: When a new run began, in milliseconds since the Unix epoch; None: now.
        """
        ...

    def log(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """Record a few metrics that are not in the trial's log.

        The first value of each (key, step) stays.
        """
        ...

    def follow(self, trial: int, step: int, *, every: int = 1, ended: bool = False) -> None:
        """Record the rows of the trial's log up to a step.

        The log is `metrics.jsonl` and `logged.jsonl` in the trial's directory. Its rows are read
        when they are delivered. The first value of each (key, step) stays.

        Args:
            step: The last step that the trial has reported.
            every: Of other rows than the first and those of epochs' ends, only those at a multiple
                of this step are recorded; see `thin_rows`.
            ended: The trial has ended: rows after `step` are recorded, too.
        """
        ...

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Set tags; a later value replaces an earlier one."""
        ...

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        """Keep a copy of the file `path` under an artifact path such as `figures/loss.png`.

        Raises:
            ValueError: `name` is not a relative path below the run.
            OSError: The file cannot be read.
        """
        ...

    def finish(
        self,
        trial: int | None,
        status: Status,
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Set a run's terminal status; `start` reopens the run.

        Args:
            at_ms: When the run ended, in milliseconds since the Unix epoch; None: now.
        """
        ...


def stored_status(status: Status) -> str:
    """Return the status that MLflow stores for `status`."""
    return "KILLED" if status == "INTERRUPTED" else status


def as_number(text: str) -> float | None:
    """Parse a parameter's text as a finite number; None if it is not one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def check_artifact_name(name: str) -> PurePosixPath:
    """Return `name` as a path; ValueError: it is empty, absolute or leaves a run's directory."""
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(
            f"artifact name is {name!r}; it must be a relative path that stays below the run; "
            "write something like 'figures/loss.png'"
        )
    return path
