"""The `Recorder` protocol of five methods, and two recorders that need no server.

Callers depend on the protocol alone. What must not live here: MLflow, queues, anything beyond the
standard library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, Protocol, runtime_checkable

from tracking.limits import clean_key
from tracking.metric_points import HighWaterMarks, MetricRow

__all__ = [
    "TAG_REPEATS",
    "MemoryRecorder",
    "MemoryRun",
    "MetricRow",
    "NullRecorder",
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
        """Record metrics. The first value of each (key, step) stays."""
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


class NullRecorder:
    """A recorder that discards everything, so that callers need no `if`."""

    def start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Do nothing."""

    def log(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """Do nothing."""

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Do nothing."""

    def artifact(self, trial: int | None, path: Path, name: str) -> None:  # noqa: ARG002 - the protocol's signature
        """Check the name, as every recorder does."""
        check_artifact_name(name)

    def finish(
        self,
        trial: int | None,
        status: Status,
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Do nothing."""


@dataclass
class MemoryRun:
    """One run in a `MemoryRecorder`."""

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    points: dict[tuple[str, int], float] = field(default_factory=dict)
    """Values by (key, step)."""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    status: str = "RUNNING"
    began_ms: int | None = None
    """`at_ms` of the first `start` that had one."""
    ended_ms: int | None = None
    """`at_ms` of the last `finish`."""
    marks: HighWaterMarks = field(default_factory=HighWaterMarks, repr=False)


class MemoryRecorder:
    """A recorder into dictionaries, by the same rules as a server: for tests and debugging."""

    def __init__(self) -> None:
        self.runs: dict[int | None, MemoryRun] = {None: MemoryRun()}

    def start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Create a trial's run, or reopen it."""
        run = self._run(trial)
        run.began_ms = run.began_ms or at_ms
        run.status = "RUNNING"
        step = max(run.marks.steps.values(), default=0)
        for name, value in params.items():
            key, text = clean_key(name), str(value)
            tag = clean_key(CHANGED_PREFIX + key)
            if run.tags.get(tag, run.params.setdefault(key, text)) == text:
                continue
            run.tags[tag] = text
            if (number := as_number(text)) is not None:
                run.points.setdefault((clean_key(PARAM_PREFIX + key), step), number)
        run.tags.update(tags)

    def log(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """Record metrics; the first value of a (key, step) stays."""
        run = self._run(trial)
        for row in run.marks.filter_new(rows):
            run.points.update({(key, row.step): value for key, value in row.metrics.items()})

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self._run(trial).tags.update(tags)

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        """Keep the file's bytes."""
        target = str(check_artifact_name(name))
        self._run(trial).artifacts[target] = path.read_bytes()

    def finish(
        self,
        trial: int | None,
        status: Status,
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Set the terminal status."""
        run = self._run(trial)
        run.tags.update(tags)
        run.status, run.ended_ms = stored_status(status), at_ms

    def _run(self, trial: int | None) -> MemoryRun:
        return self.runs.setdefault(trial, MemoryRun())
