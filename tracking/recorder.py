"""The recorder of a sweep: its methods append to the outbox, which a thread or process delivers.

No method waits for the tracking server, and no error of the server reaches a caller. What must not
live here: when records are delivered (see `tracking.delivery_loop`), how a record becomes calls
(see `tracking.delivery`), and any tracking service (see `tracking.trackers`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal, NamedTuple

from redaction.secrets import redact_value
from tracking.delivery_loop import DeliveryProcess, DeliveryThread, Destination
from tracking.limits import MAX_PARAM_VALUE, MAX_TAG_VALUE, clean_key, clean_text, clip_text
from tracking.metric_points import MetricRow
from tracking.outbox import SWEEP, Kind, Outbox, logger
from tracking.outbox_status import read_outbox
from tracking.tracker import TrackedSweep, Tracker
from tracking.unsent_rows import Target

Status = Literal["FINISHED", "KILLED", "FAILED", "INTERRUPTED"]
"""How a run ends. INTERRUPTED means that it will resume; MLflow stores it as KILLED."""
_INHERITED = (
    "mlflow.user",
    "mlflow.source.",
    "gradsweep.command",
    "gradsweep.code",
    "gradsweep.data",
)
"""Prefixes of the tags that name the user, the command, the code and the data."""
Deliver = Callable[[Destination], DeliveryThread | DeliveryProcess]
"""Starts what delivers an outbox."""
_SWEEP_ID = re.compile(r"[\w.-]{1,200}")


class BeforeRecords(NamedTuple):
    """What a recorder calls before it records."""

    check: Callable[[], None] = lambda: None
    """Raises if this process must not write any more."""
    on_finish: Callable[[int | None, Status, Mapping[str, str]], None] = lambda *_: None
    """Receives each end: trial, status and tags; see `Recorder.finish`."""


class Recorder:
    """Records a sweep as one run, and each trial as one child of it.

    A trial of `None` means the sweep's own run. An outbox that cannot be written raises
    `OutboxError`.

    Args:
        announce: Open the sweep's run, and tag the experiment.
        deliver: Starts what delivers the outbox; None: records are only queued.
        before: What is called before each record.
    """

    def __init__(
        self,
        uri: str,
        artifact_root: Path | None,
        sweep: TrackedSweep,
        *,
        announce: bool = True,
        deliver: Deliver | None = DeliveryThread,
        before: BeforeRecords | None = None,
    ) -> None:
        if not _SWEEP_ID.fullmatch(sweep.sweep_id):
            raise ValueError(
                f"sweep_id is {sweep.sweep_id!r}; it must be 1 to 200 letters, digits, '_', '-' "
                "or '.'; use uuid4().hex"
            )
        self._check, self._on_finish = before or BeforeRecords()
        self._outbox = Outbox(sweep.outbox)
        if self._outbox.moved_aside is not None:
            logger.warning(
                "the outbox was damaged and is now %s; a new one is used", self._outbox.moved_aside
            )
        self._inherited = clean_tags(
            {k: v for k, v in sweep.inherited.items() if k.startswith(_INHERITED)}
        )
        if announce:
            self._start(SWEEP, sweep.params, sweep.tags, {})
            if sweep.experiment_tags:
                self._append(None, "experiment", sweep.experiment_tags)
        destination = Destination(
            uri,
            None if artifact_root is None else str(artifact_root),
            sweep.experiment,
            sweep.sweep_id,
            str(sweep.outbox),
        )
        self._drain = None if deliver is None else deliver(destination)

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
        self._start(trial, params, tags, self._inherited, at_ms)

    def log(self, trial: int, rows: Iterable[MetricRow]) -> None:
        """Record a few metrics that are not in the trial's log.

        The first value of each (key, step) stays.
        """
        self._check()
        self._outbox.append_rows(trial, rows)

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
        self._check()
        self._outbox.follow(trial, Target(step, every, ended))

    def tag(self, trial: int | None, tags: Mapping[str, str]) -> None:
        """Set tags; a later value replaces an earlier one."""
        if tags:
            self._append(trial, "tags", clean_tags(tags))

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        """Keep a copy of the file `path` under an artifact path such as `figures/loss.png`.

        Raises:
            ValueError: `name` is not a relative path below the run.
            OSError: The file cannot be read.
        """
        self._check()
        self._outbox.append_artifact(_number(trial), path, name)

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
        self._check()
        self._on_finish(trial, status, tags)
        payload = {
            "status": stored_status(status),
            "told": status,
            "time": _now_ms() if at_ms is None else at_ms,
            "tags": clean_tags(tags),
        }
        self._append(trial, "finish", payload)

    # -- status and waiting -----------------------------------------------------------------------

    @property
    def needs_figures(self) -> bool:
        """Whether the figures must be sent again, because the store or a run in it is new."""
        return self._outbox.needs_figures

    def figures_sent(self) -> None:
        """Note that the figures of all trials were queued again."""
        self._outbox.figures_sent()

    def pending(self) -> int:
        """How many records wait."""
        return self._outbox.pending

    @property
    def seconds_unresponsive(self) -> float:
        """For how many seconds the server has answered no request; 0 while it answers.

        Infinite when nothing is delivered.
        """
        if self._drain is None:
            return math.inf
        last_answer = self._drain.last_answer
        return 0.0 if last_answer is None else time.monotonic() - last_answer

    def flush(self, timeout: float) -> int:
        """Wait for at most `timeout` seconds until the outbox is empty; returns its length."""
        deadline = time.monotonic() + timeout
        if self._drain is not None:
            self._drain.flush_now(True)
        while (
            (left := self._outbox.pending)
            and time.monotonic() < deadline
            and self._drain is not None
            and self._drain.is_alive
        ):
            time.sleep(0.01)
        if self._drain is not None:
            self._drain.flush_now(False)
        return left

    def close(self, timeout: float) -> int:
        """Deliver for at most `timeout` seconds, then stop."""
        if self._drain is not None:
            self._drain.close(time.monotonic() + max(timeout, 0.0))
        self._outbox.close()
        return self._outbox.pending

    # -- private ----------------------------------------------------------------------------------

    def _start(
        self,
        trial: int,
        params: Mapping[str, object],
        tags: Mapping[str, str],
        inherited: Mapping[str, str],
        at_ms: int | None = None,
    ) -> None:
        payload = {
            "params": _clean(params, MAX_PARAM_VALUE),
            "tags": clean_tags(tags),
            "inherited": inherited,
            "time": _now_ms() if at_ms is None else at_ms,
            "step": self._outbox.last_step(trial),
        }
        self._append(trial, "start", payload)

    def _append(self, trial: int | None, kind: Kind, payload: Mapping[str, object]) -> None:
        self._check()
        self._outbox.append(_number(trial), kind, payload)


def process_with(environment: Mapping[str, str]) -> Deliver:
    """Return what delivers in a process with this environment."""
    return lambda destination: DeliveryProcess(destination, environment)


def set_target(outbox: Path, tracker: Tracker) -> None:
    """Make an outbox deliver to a tracker; see `Outbox.set_target`."""
    with closing(Outbox(outbox)) as queue:
        gone = tracker.has_lost(list(queue.runs().values()))
        queue.set_target(tracker.identity(), gone=gone)


def reset_trials(outbox: Path, trials: Mapping[int | None, bool]) -> None:
    """Make an outbox record some trials from their beginning; see `Outbox.reset_trials`."""
    if trials:
        with closing(Outbox(outbox)) as queue:
            queue.reset_trials({_number(trial): is_gone for trial, is_gone in trials.items()})


def sync(
    uri: str,
    artifact_root: Path | None,
    experiment: str,
    sweep_id: str,
    outbox: Path,
    *,
    patience: float,
) -> int:
    """Deliver an earlier process' outbox, change nothing else, and return how many records wait.

    Gives up after `patience` seconds without a delivery; there is no other limit. If none waits at
    the start, mlflow is not imported.
    """
    left = read_outbox(outbox).pending
    if not left:
        return 0
    sweep = TrackedSweep(experiment=experiment, sweep_id=sweep_id, outbox=outbox)
    recorder = Recorder(uri, artifact_root, sweep, announce=False)
    while 0 < (now := recorder.flush(patience)) < left:
        left = now
    return recorder.close(0.0)


def _number(trial: int | None) -> int:
    return SWEEP if trial is None else trial


def stored_status(status: Status) -> str:
    """Return the status that MLflow stores for `status`."""
    return "KILLED" if status == "INTERRUPTED" else status


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return tags as the recorder writes them: redacted, cleaned, cut to the store's limits."""
    return _clean(tags, MAX_TAG_VALUE)


def _clean(texts: Mapping[str, object], limit: int) -> dict[str, str]:
    return {
        clean_key(name): clip_text(clean_text(redact_value(name, str(value))), limit)
        for name, value in texts.items()
    }
