"""A recorder into dictionaries, by the same rules as a tracking server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tracking.delivery import CHANGED_PREFIX, PARAM_PREFIX, as_number
from tracking.limits import clean_key
from tracking.metric_points import HighWaterMarks, MetricRow
from tracking.outbox_file import check_artifact_name
from tracking.recorder import Status, stored_status
from tracking.unsent_rows import Target, TrialLog


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
    target: Target | None = None
    """How much of the trial's log is followed."""
    marks: HighWaterMarks = field(default_factory=HighWaterMarks, repr=False)


class MemoryRecorder:
    """Records into `runs`; `check` is called before each record, as in `Recorder`.

    Without the directory of an outbox, beside which the trials' logs are, logs have no rows.
    """

    def __init__(
        self, check: Callable[[], None] = lambda: None, *, outbox: Path | None = None
    ) -> None:
        self.runs: dict[int | None, MemoryRun] = {None: MemoryRun()}
        self._check, self._outbox = check, outbox

    def start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        *,
        at_ms: int | None = None,
    ) -> None:
        """Create a trial's run, or reopen it."""
        self._check()
        run = self._run(trial)
        run.began_ms = run.began_ms or at_ms
        run.status = "RUNNING"
        step = max([run.target.step if run.target else 0, *run.marks.steps.values()])
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
        self._check()
        run = self._run(trial)
        for point in run.marks.filter_new(rows):
            run.points[point.key, point.step] = point.value

    def follow(self, trial: int, step: int, *, every: int = 1, ended: bool = False) -> None:
        """Record the rows of the trial's log that are there now."""
        self._check()
        run = self._run(trial)
        run.target = Target(step, every, ended)
        if self._outbox is not None:
            log = TrialLog(self._outbox, trial)
            for point in log.read(run.target, run.marks, 10**9).points:
                run.points[point.key, point.step] = point.value

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Set tags."""
        self._check()
        self._run(trial).tags.update(tags)

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        """Keep the file's bytes."""
        self._check()
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
        self._check()
        run = self._run(trial)
        run.tags.update(tags)
        run.status, run.ended_ms = stored_status(status), at_ms

    def _run(self, trial: int | None) -> MemoryRun:
        return self.runs.setdefault(trial, MemoryRun())
