"""LockedRecorder: checks the sweep's lock before each record.

Another driver may replace a driver that was suspended. Records of the old driver would then follow
those of the new one. What must not live here: what is recorded, and the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tracking.recorder import MetricRow, Recorder, Status


class LockedRecorder:
    """Records as long as this driver holds the sweep's lock."""

    def __init__(self, recorder: Recorder, fence: Callable[[], None]) -> None:
        self._recorder = recorder
        self._fence = fence

    def start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """See `Recorder.start`."""
        self._fence()
        self._recorder.start(trial, params, tags, at_ms=at_ms)

    def log(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """See `Recorder.log`."""
        self._fence()
        self._recorder.log(trial, rows)

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """See `Recorder.tag`."""
        self._fence()
        self._recorder.tag(trial, tags)

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        """See `Recorder.artifact`."""
        self._fence()
        self._recorder.artifact(trial, path, name)

    def finish(
        self,
        trial: int | None,
        status: Status,
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """See `Recorder.finish`."""
        self._fence()
        self._recorder.finish(trial, status, tags, at_ms=at_ms)
