"""What `sweep run` and `sweep resume` print: before the trials, meanwhile, and at the end.

On a terminal a table shows the running trials. What must not live here: running a sweep
(`run.launch`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.status import Status
from rich.text import Text

from redaction.escapes import printable
from sweeps.cli import messages
from sweeps.cli.console import err, out
from sweeps.cli.plain_console import redraws
from sweeps.cli.process_end import OutputClosed
from sweeps.cli.render import trial_table
from sweeps.errors import (
    HELD,
    NO_SUCCESS,
    WRONG_INPUT,
    ExitRequested,
    LedgerBusy,
    LedgerError,
    LedgerRefused,
    LockLost,
    LockTaken,
)
from sweeps.formatting import format_best, format_duration, format_number, joined
from sweeps.paths import SweepPaths
from sweeps.run.launch import AttemptFailed
from sweeps.run.prepared import PreparedSweep
from sweeps.spec.spec import SweepSpec
from sweeps.trust.findings import findings_of
from sweeps.view.observer import ShutdownNotices, TrialProgress, TrialStart
from sweeps.view.outcome import SweepOutcome
from sweeps.view.sweep_progress import (
    SweepProgress,
    best_with_value,
    ended_line,
    metrics_beside,
)
from tracking.outbox_file import OutboxError
from trainable.errors import StorageError
from trainable.store.regular_files import IrregularFile

if TYPE_CHECKING:
    from sweeps.ledger.trials import TrialSummary
    from trainable.store.metrics_file import CurveDamaged

_REFUSED = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
"""Errors of a full or read-only storage."""


class RunConsole:
    """Shows how a sweep starts and runs: by a spinner, then on the console."""

    def __init__(self, spinner: Status, *, console: Console = out) -> None:
        self._console = console
        self.notices: ShutdownNotices = messages.ConsoleNotices()
        self._spinner = spinner

    def doing(self, activity: str) -> None:
        """Let the spinner say what time is spent on."""
        self._spinner.update(activity)
        self._spinner.start()

    def warn(self, message: str) -> None:
        """Print a warning."""
        messages.sentence(err, message, style="yellow")

    def begin(
        self, prepared: PreparedSweep, before: Sequence[TrialSummary], num_trials: int
    ) -> ProgressTable | PlainLines:
        """Print what will run, and return the display of its progress."""
        self._spinner.stop()
        cluster = f", {prepared.cluster}" if prepared.cluster else ""
        messages.sentence(err, f"  {prepared.resources.describe()}{cluster}", style="")
        messages.task_facts(err, prepared.facts)
        if (plan := prepared.new_plan) is not None:
            messages.plan(err, prepared.spec, plan)
        return view_on(self._console, prepared.spec, before, total=num_trials)

    def cluster_unanswered(self, file: TextIO, message: str) -> None:
        """Print the last line of this process."""
        messages.cluster_unanswered(file, message)


def run_to_end(
    go: Callable[[], SweepOutcome | None],
    paths: SweepPaths,
    spinner: Status,
    *,
    command: str = "resume",
) -> int:
    """Run a sweep, print how it ended, and return the exit code.

    `command` continues it; one other than `resume` prints by itself how a sweep ended well.
    """
    is_new = not paths.exists()
    try:
        outcome = go()
    except ExitRequested as request:
        spinner.stop()
        if is_new and paths.exists():
            messages.interrupted(err, paths, command)
        else:
            messages.nothing_started(err)
        return request.exit_code
    except AttemptFailed as failure:
        spinner.stop()
        return report_error(failure.cause, paths, err, command)
    spinner.stop()
    if command == "resume" and outcome is not None:
        messages.outcome(out, err, outcome, paths, findings_of(paths, outcome))
    elif outcome is not None:
        messages.end_of_extra(err, outcome, paths, command)
    return 0 if outcome is None else outcome.exit_code


def report_error(
    error: CurveDamaged | LedgerError | LockLost | StorageError | OSError,
    paths: SweepPaths,
    err: Console,
    command: str = "resume",
) -> int:
    """Print why a sweep stopped and what resumes it, and return the exit code.

    The code is `NO_SUCCESS` for storage that fails while a sweep exists; `WRONG_INPUT` for storage
    that fails before, and for a damaged ledger or metrics file.
    """
    code = WRONG_INPUT
    if isinstance(error, LedgerBusy | LockLost):
        code = HELD
    elif isinstance(error, IrregularFile | LockTaken):
        pass  # the user must correct it, whether or not the sweep exists
    elif isinstance(error, LedgerRefused | StorageError | OSError) and paths.exists():
        code = NO_SUCCESS
    cause = str(error)
    if isinstance(error, OSError) and not isinstance(error, OutboxError | OutputClosed):
        cause = _describe_full_disk(error, paths)
    messages.sentence(err, f"stopped: {cause}" if code == NO_SUCCESS else cause, style="red")
    if paths.exists():
        first = "when the other process has ended" if code == HELD else "when this is corrected"
        messages.sentence(err, f"{first}, continue with:", style="")
        messages.resume(err, paths, command=command)
    return code


def _describe_full_disk(error: OSError, paths: SweepPaths) -> str:
    """Return the message of a file error, with the free space if the storage refuses writes."""
    if error.errno not in _REFUSED or not paths.exists():
        return str(error)
    free = shutil.disk_usage(paths.directory).free
    return (
        f"{paths.directory} cannot be written: {error}; {free} bytes are free on that disk; saved "
        "files are untouched; free space or correct the permissions, then resume"
    )


def view_on(
    console: Console,
    spec: SweepSpec,
    before: Sequence[TrialSummary] = (),
    *,
    total: int | None = None,
) -> ProgressTable | PlainLines:
    """Return a live table if the console can redraw it in place, else plain lines."""
    progress = SweepProgress(spec, before, total=total)
    return ProgressTable(console, progress) if redraws(console) else PlainLines(console, progress)


class _Display:
    """Counts a sweep's events for its display, and shows none."""

    def __init__(self, console: Console, progress: SweepProgress) -> None:
        self._console, self._progress, self._spec = console, progress, progress.spec

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._progress.is_stopping |= error is not None

    def reported(self, progress: TrialProgress) -> None:
        self._progress.reported(progress)

    def paused(self, number: int, value: float | None) -> None:
        del value
        self._progress.ended(number, "waiting")

    def promoted(self, number: int) -> None:
        self._progress.promoted(number)

    def warned(self, number: int, sentence: str) -> None:
        line = printable(f"trial {number}: {sentence}")
        self._console.print(line, style="yellow", soft_wrap=True)

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        del value, reason
        self._progress.ended(number, state)

    def stopping(self) -> None:
        self._progress.is_stopping = True


class ProgressTable(_Display):
    """A table of the running, the best and the newest trials, redrawn four times a second."""

    def __init__(self, console: Console, progress: SweepProgress) -> None:
        super().__init__(console, progress)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        super().__exit__(_, error, __)
        self._live.stop()

    def started(self, start: TrialStart) -> None:
        self._progress.started(start)
        if start.step:  # above the table
            self._console.print(
                f"trial {start.number} resumes at step {start.step}", soft_wrap=True
            )

    def render(self) -> Group:
        """Return the table, the best trial so far, and the remaining time."""
        summary = Text(self._summary(), style="bold")
        rows, size = self._progress.rows, self._console.size
        if not rows:
            return Group(summary)
        taken = len(summary.wrap(self._console, size.width)) + 1  # Rich keeps the last line free
        table = trial_table(
            rows,
            self._spec,
            self._progress.durations(),
            height=size.height - taken,
            live=True,
        )
        return Group(table, summary)

    def _summary(self) -> str:
        progress = self._progress
        elapsed = format_duration(progress.elapsed)
        parts = [self._spec.name]
        if progress.rows:
            parts.append(f"{progress.num_finished}/{progress.total} trials")
        if found := best_with_value(progress.rows, self._spec):
            best, value = found
            shown = f"{format_number(value)} (trial {best.number})"
            parts.append(f"best {self._spec.metrics[0]} {shown}")
        if progress.is_stopping:
            parts.append("stopping")
        elif progress.is_starting:
            parts.append("starting workers")
        return " · ".join([*parts, elapsed, *_left(progress)])


def _left(progress: SweepProgress) -> list[str]:
    left = progress.seconds_left()
    return [] if left is None else [f"about {format_duration(left)} left"]


class PlainLines(_Display):
    """One line per event, for logs and pipes, with the time since the start."""

    def started(self, start: TrialStart) -> None:
        self._progress.started(start)
        again = f" (attempt {start.attempt})" if start.attempt > 1 else ""
        if start.step is not None:
            again += f", resumes at step {start.step}" if start.step else ", from the beginning"
        word = self._spec.repeats.word
        seed = f", a further {word} of trial {start.origin}" if start.role == "repeat" else ""
        self._print(f"trial {start.number} started{again}{seed}: {joined(start.params)}")

    def reported(self, progress: TrialProgress) -> None:
        super().reported(progress)
        beside = metrics_beside(progress.metrics, self._spec)
        names = (*self._spec.metrics, *beside, "train/lr", "train/grad_norm")
        shown = {name: progress.metrics[name] for name in names if name in progress.metrics}
        budget = self._spec.budget
        self._print(
            f"trial {progress.number} {budget.report_word} {progress.epoch}/{budget.reports}: "
            f"{joined(shown)}"
        )

    def paused(self, number: int, value: float | None) -> None:
        super().paused(number, value)
        shown = "" if value is None else f", {self._value(value)}"
        self._print(f"trial {number} waits for its promotion{shown}")

    def promoted(self, number: int) -> None:
        super().promoted(number)
        self._print(f"trial {number} promoted")

    def ended(
        self, number: int, state: str, value: float | list[float] | None, reason: str | None
    ) -> None:
        super().ended(number, state, value, reason)
        count = f"{self._progress.num_finished}/{self._progress.total} trials"
        self._print(f"{ended_line(self._spec, number, state, value, reason)} ({count})")

    def _value(self, value: float | list[float]) -> str:
        return format_best(self._spec.metrics, value, final=self._spec.select == "final")

    def _print(self, line: str) -> None:
        elapsed = format_duration(self._progress.elapsed)
        parts = [printable(line), elapsed, *_left(self._progress)]
        self._console.print(" · ".join(parts), soft_wrap=True)
