"""Five verbs by which a sweep tells what happened, and two recorders that need no server.

Whoever records holds a `Recorder` and never asks which one. What must not live here: MLflow,
queues, anything beyond the standard library.
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
    "MemoryRecorder",
    "MemoryRun",
    "MetricRow",
    "NullRecorder",
    "Recorder",
    "Status",
    "check_artifact_name",
]

Status = Literal["FINISHED", "KILLED", "FAILED", "INTERRUPTED"]
"""How a run ends. One that is INTERRUPTED goes on later; no store has a word for that."""
CHANGED_PREFIX = "param_changed."
PARAM_PREFIX = "param/"


@runtime_checkable
class Recorder(Protocol):
    """Where a sweep and its trials are recorded; `None` for a trial means the sweep itself."""

    def start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Open a trial's run, or open it again.

        The first value of a parameter stays. One that changes later becomes the tag
        `param_changed.<key>`, which says what it is now, and where it is a number also a value of
        the metric `param/<key>` at the last step that was recorded before.

        Args:
            at_ms: When a new run began, in milliseconds since the Unix epoch; None: now.
        """
        ...

    def log(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """Record metrics. A step that was recorded before is left as it was."""
        ...

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Set tags; the last value stays."""
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
        """Give a run its terminal status; `start` opens it again.

        Args:
            at_ms: When it ended, as for `start`.
        """
        ...


def stored(status: Status) -> str:
    """Return what a store calls it."""
    return "KILLED" if status == "INTERRUPTED" else status


def as_number(text: str) -> float | None:
    """Return the number that a parameter's text is; None where it is none that is finite."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def check_artifact_name(name: str) -> PurePosixPath:
    """Return `name` as a path.

    Raises:
        ValueError: It is empty, absolute, or leaves the run's directory.
    """
    path = PurePosixPath(name)
    if not path.name or path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError(
            f"artifact name is {name!r}; it must be a relative path that stays below the run; "
            "write something like 'figures/loss.png'"
        )
    return path


class NullRecorder:
    """Records nothing, so that callers need no `if`."""

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
        """Check the name, as every recorder does, and do nothing."""
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
    """One run as `MemoryRecorder` keeps it."""

    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    points: dict[tuple[str, int], float] = field(default_factory=dict)
    """Values by (key, step)."""
    artifacts: dict[str, bytes] = field(default_factory=dict)
    status: str = "RUNNING"
    began_ms: int | None = None
    """As `start` was told first."""
    ended_ms: int | None = None
    """As `finish` was told last."""
    marks: HighWaterMarks = field(default_factory=HighWaterMarks, repr=False)


class MemoryRecorder:
    """Records into dictionaries, under the same rules as a server: for tests and debuggers."""

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
        """Open a trial's run, or open it again."""
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
        run.status, run.ended_ms = stored(status), at_ms

    def _run(self, trial: int | None) -> MemoryRun:
        return self.runs.setdefault(trial, MemoryRun())
