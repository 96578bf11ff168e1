"""What `sweep run` and `sweep resume` print: before the trials, meanwhile, and at the end.

What must not live here: running a sweep (`operations.run`), and the live table
(`progress_display`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.status import Status

from sweeps.commands import messages
from sweeps.commands.broken_pipe import OutputClosed
from sweeps.commands.console import err, out
from sweeps.commands.progress_display import PlainLines, ProgressTable, view_on
from sweeps.errors import (
    ExitRequested,
    LedgerBusy,
    LedgerError,
    LedgerRefused,
    LockLost,
    LockTaken,
)
from sweeps.exit_codes import HELD, NO_SUCCESS, WRONG_INPUT
from sweeps.operations.run import AttemptFailed, PreparedSweep, findings_of
from sweeps.paths import SweepPaths
from sweeps.results.observer import ShutdownNotices
from sweeps.results.outcome import SweepOutcome
from tracking.outbox_file import OutboxError
from trainable.errors import StorageError
from trainable.storage.regular_files import IrregularFile

if TYPE_CHECKING:
    from trainable.metrics_file import CurveDamaged

_REFUSED = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
"""Errors of a full or read-only storage."""


class RunConsole:
    """Shows on the console how a sweep starts and runs.

    Args:
        spinner: Says what time is spent on, until the trials start.
        console: Shows the trials.
    """

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

    def begin(self, prepared: PreparedSweep) -> ProgressTable | PlainLines:
        """Print what will run, and return the display of its progress."""
        self._spinner.stop()
        cluster = f", {prepared.cluster}" if prepared.cluster else ""
        messages.sentence(err, f"  {prepared.resources.describe()}{cluster}", style="")
        messages.task_facts(err, prepared.facts)
        if prepared.plan is not None:
            messages.plan(err, prepared.spec, prepared.plan)
        return view_on(
            self._console,
            prepared.spec,
            prepared.before,
            total=prepared.num_trials,
            delivery=prepared.delivery,
        )

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
    """Run a sweep, and print how it ended.

    Args:
        go: Runs it.
        paths: The sweep's directory.
        spinner: Is stopped at the end.
        command: The command that continues it; one other than `resume` prints by itself how a
            sweep ended well.

    Returns:
        The exit code.
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
    """Print why a sweep stopped, and the command that resumes it if the sweep exists.

    Returns:
        The exit code: `NO_SUCCESS` for storage that fails while a sweep exists; `WRONG_INPUT` for
        storage that fails before, and for a damaged ledger or metrics file.
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
