"""What is asked of a running sweep from another terminal, or another host: to drain, to leave, to
end one trial.

A wish is an empty file below the sweep's `control/` whose name begins with the driver's token: the
driver that it was meant for sees it, and no later one ever does. The directory is the driver's,
and only its user may enter it. The commands wait until what they asked for has happened, and say
so. What must not live here: how a driver fulfils a wish (`run`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from sweeps.formatting import format_number
from sweeps.ledger.reader import LedgerReader
from sweeps.paths import SweepPaths
from sweeps.results.sweep_status import SweepStatus
from sweeps.sweep_lock import LockOwner, is_held, read_holder

_DRAIN, _NOW, _STOP = "drain", "now", "stop-"
_BEGIN_SECONDS = 5.0
"""How long a driver may take from its lock to its `control/`."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at whether a wish has been fulfilled."""
_NOW_SECONDS = 10.0
"""How long a driver may take to leave at once."""


class NotRunningError(ValueError):
    """What shall be stopped is not running."""


class NobodyRuns(NotRunningError):
    """What shall be stopped is of a sweep that no driver runs."""


class StopRequests:
    """The driver's side: what is asked of it.

    Args:
        paths: The sweep, whose `control/` is gone; it is made anew.
        token: The driver's; wishes for another one are not seen.

    Raises:
        FileExistsError: Another user's `control/` is in the way.
    """

    def __init__(self, paths: SweepPaths, token: str) -> None:
        self._directory = paths.control
        paths.control.mkdir(mode=0o700)
        self._prefix = f"{token}-"
        self.drain = False
        self.now = False
        self.trials: frozenset[int] = frozenset()
        """The trials that shall end, by number."""

    def look(self) -> None:
        """Read what is asked by now; a wish is never taken back."""
        try:
            names = os.listdir(self._directory)
        except OSError:  # nothing was asked yet, or a network's directory is away for a moment
            return
        wishes = {
            name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)
        }
        self.drain, self.now = _DRAIN in wishes, _NOW in wishes
        self.trials = frozenset(int(w[len(_STOP) :]) for w in wishes if w.startswith(_STOP))


def request_stop(paths: SweepPaths, numbers: Iterable[int] | None = None) -> None:
    """Tell trials to checkpoint at their next step and end: all of them, or the given ones for
    good.
    """
    paths.control.mkdir(mode=0o700, exist_ok=True)
    for file in [paths.drain] if numbers is None else map(paths.stop, numbers):
        file.touch()


@dataclass(frozen=True)
class StopResult:
    """What came of asking a sweep to stop."""

    name: str
    trial: int | None
    """The trial that was to end; None when it was the whole sweep."""
    done: bool
    """Whether it has happened by now."""
    state: str
    """The sweep's or the trial's."""
    message: str

    def as_dict(self) -> dict[str, Any]:
        """Return it as it stands in `--json`."""
        return asdict(self)


def stop_sweep(
    paths: SweepPaths, *, now: bool, seconds: float, say: Callable[[str], None]
) -> StopResult:
    """Ask a sweep's driver to drain, or to leave at once, and wait until it is gone.

    Args:
        seconds: For how long to wait for a drain.
        say: Told what is waited for.

    Raises:
        NothingToStop: No driver runs.
    """
    view, holder = SweepStatus(paths), _holder(paths)
    who = f"process {holder.pid} on {holder.host}"
    _write_request(paths, holder, _NOW if now else _DRAIN)
    say(f"waiting for {who} to leave" if now else f"trials save their state; waiting for {who}")

    def gone() -> bool:
        return read_holder(paths.lock) != holder or not is_held(paths.lock)

    if _wait(gone, _NOW_SECONDS if now else seconds):
        view = SweepStatus(paths)
        return StopResult(paths.name, None, True, view.state, f"stopped; it is {view.state} now")
    later = (
        f"end it there with: kill -9 {holder.pid}"
        if now
        else f"wait longer with --timeout, or leave at once with: {paths.command('stop', '--now')}"
    )
    limit = _NOW_SECONDS if now else seconds
    return StopResult(
        paths.name, None, False, view.state, f"{who} has not left after {limit:g} s; {later}"
    )


def stop_trial(
    paths: SweepPaths, number: int, *, seconds: float, say: Callable[[str], None]
) -> StopResult:
    """Ask a sweep's driver to end one trial, and wait until that is written down.

    Args:
        number: The trial's.
        seconds: For how long to wait.
        say: Told what is waited for.

    Raises:
        NobodyRuns: No driver runs the sweep.
        NothingToStop: The trial has ended already, or another host runs the sweep.
        UnknownTrial: There is no such trial.
    """
    view = SweepStatus(paths)
    record = view.record(number)
    if record.finished:
        raise NotRunningError(
            f"trial {number} of sweep '{paths.name}' is {record.state} already; only a trial that "
            f"has not ended can be stopped; look with: {paths.command('trials')}"
        )
    holder = _holder(paths)
    _write_request(paths, holder, f"{_STOP}{number}")
    say(f"trial {number} saves its state at its next step")
    gone = False

    def ended() -> bool:
        nonlocal gone
        gone = read_holder(paths.lock) != holder or not is_held(paths.lock)
        return LedgerReader(view.place).trials[number].finished or gone

    _wait(ended, seconds)
    record = LedgerReader(view.place).trials[number]
    if record.finished:
        value = (
            f" with its best value {format_number(record.value)}"
            if record.value is not None
            else ""
        )
        after = f" after epoch {record.epoch}" if record.epoch else " before its first report"
        message = f"trial {number} is {record.state}{after}{value}; the sweep goes on"
    elif gone:
        message = (
            f"the sweep ended before trial {number} did; "
            f"it goes on with: {paths.command('resume')}"
        )
    else:
        message = (
            f"trial {number} has not ended after {seconds:g} s; it will at its next step, "
            "or when the driver's grace period is over; "
            f"look with: {paths.command('show', str(number))}"
        )
    return StopResult(paths.name, number, record.finished, record.state, message)


def _holder(paths: SweepPaths) -> LockOwner:
    holder = read_holder(paths.lock) if is_held(paths.lock) else None
    if holder is None:
        view = SweepStatus(paths)
        if view.holder is not None:
            raise NotRunningError(
                f"sweep '{paths.name}' is run by {view.holder.describe()} with another directory "
                f"than {paths.directory}; a sweep is stopped by what is written there; stop it on "
                "that host"
            )
        state = view.state
        after = f"; continue it with: {paths.command('resume')}" * (state == "interrupted")
        raise NobodyRuns(
            f"sweep '{paths.name}' is {state} and nobody is running it; only a running sweep can "
            f"be stopped{after}"
        )
    return holder


def _write_request(
    paths: SweepPaths, holder: LockOwner, wish: Literal["drain", "now"] | str
) -> None:
    _wait(paths.control.is_dir, _BEGIN_SECONDS)
    (paths.control / f"{holder.token}-{wish}").touch()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_EVERY)
    return True
