"""Stop a running sweep from another terminal or host, or end one trial for good.

A request is an empty file in the sweep's `control/`, which only the driver's user may enter. Its
name begins with the token of the driver that reads it; a later driver ignores it. The requesting
process waits until the driver has acted. What must not live here: how a driver acts on a request
(`tune_loop`, `run.driver`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from sweeps.engine.process_cleanup import end_orphans
from sweeps.formatting import format_number
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.reasons import BY_THE_USER
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import trial_state
from sweeps.reconcile.reconcile import unreported
from sweeps.reconcile.repairs import close_stores, report_missing
from sweeps.run.sync import queue_interruptions
from sweeps.search.pbt_exploit import without_unbegun
from sweeps.stores import check_kept, trial_files
from sweeps.sweep_lock import LockOwner, SweepLock, is_held, read_holder
from sweeps.view.sweep_view import SweepView
from tracking.outbox_status import read_outbox

_DRAIN, _NOW, _STOP = "drain", "now", "stop-"
_BEGIN_SECONDS = 5.0
"""How long a driver may take from acquiring its lock to creating `control/`."""
_POLL_SECONDS = 0.2
"""Seconds between two checks whether the driver has acted."""
_NOW_SECONDS = 10.0
"""How long a driver may take to exit immediately."""


class NotRunningError(ValueError):
    """The sweep or trial to stop is not running."""


class NoDriverError(NotRunningError):
    """No driver runs the sweep."""


class StopRequests:
    """The stop requests that the driver has received."""

    def __init__(self, paths: SweepPaths, token: str) -> None:
        self._directory = paths.control
        paths.control.mkdir(mode=0o700)
        self._prefix = f"{token}-"
        self.drain = False
        self.now = False
        self.trials: frozenset[int] = frozenset()
        """The numbers of the trials to end."""

    def look(self) -> None:
        """Read the requests; a request is never withdrawn."""
        try:
            names = os.listdir(self._directory)
        except OSError:  # a network file system may be unavailable for a moment
            return
        requests = {
            name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)
        }
        self.drain, self.now = _DRAIN in requests, _NOW in requests
        self.trials = frozenset(int(r[len(_STOP) :]) for r in requests if r.startswith(_STOP))


def request_stop(paths: SweepPaths, numbers: Iterable[int] | None = None) -> None:
    """Make workers save a checkpoint at their next step and stop."""
    paths.control.mkdir(mode=0o700, exist_ok=True)
    for file in [paths.drain] if numbers is None else map(paths.stop, numbers):
        file.touch()


def request_move(paths: SweepPaths, node: str) -> None:
    """Make the trials of a node save a checkpoint at their next step and leave the node."""
    Path(f"{paths.leaves}{node}").touch()


@dataclass(frozen=True)
class StopResult:
    """The result of a stop request."""

    name: str
    trial: int | None
    """The trial to end; None for the whole sweep."""
    done: bool
    """Whether the sweep or trial has stopped."""
    state: str
    """The state of the sweep or trial."""
    message: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        return asdict(self)


def stop_sweep(
    paths: SweepPaths, *, now: bool, seconds: float, say: Callable[[str], None]
) -> StopResult:
    """Request that a sweep's driver drains or exits immediately, and wait until it has exited."""
    status, holder = SweepView(paths), _holder(paths)
    who = f"process {holder.pid} on {holder.host}"
    _write_request(paths, holder, _NOW if now else _DRAIN)
    say(f"waiting for {who} to exit" if now else f"trials save their state; waiting for {who}")

    def gone() -> bool:
        return read_holder(paths.lock) != holder or not is_held(paths.lock)

    if _wait(gone, _NOW_SECONDS if now else seconds):
        status = SweepView(paths)
        return StopResult(
            paths.name, None, True, status.state, f"stopped; it is {status.state} now"
        )
    later = (
        f"end it there with: kill -9 {holder.pid}"
        if now
        else "wait longer with --timeout, or stop immediately with: "
        f"{paths.command('stop', '--now')}"
    )
    limit = _NOW_SECONDS if now else seconds
    return StopResult(
        paths.name, None, False, status.state, f"{who} has not exited after {limit:g} s; {later}"
    )


def stop_trial(
    paths: SweepPaths, number: int, *, seconds: float, say: Callable[[str], None]
) -> StopResult:
    """Request that a sweep's driver ends one trial, and wait until the ledger records the end."""
    status = SweepView(paths)
    record = status.record(number)
    if record.finished:
        raise NotRunningError(
            f"trial {number} of sweep '{paths.name}' is {record.state} already; only a trial that "
            f"has not ended can be stopped; see: {paths.command('trials')}"
        )
    holder = _holder(paths)
    _write_request(paths, holder, f"{_STOP}{number}")
    say(f"trial {number} saves its state at its next step")
    gone = False

    def ended() -> bool:
        nonlocal gone
        gone = read_holder(paths.lock) != holder or not is_held(paths.lock)
        return LedgerReader(status.paths.ledger).trials[number].finished or gone

    _wait(ended, seconds)
    record = LedgerReader(status.paths.ledger).trials[number]
    if record.finished:
        value = (
            f" with its best value {format_number(record.value)}"
            if record.value is not None
            else ""
        )
        after = f" after epoch {record.epoch}" if record.epoch else " before its first report"
        message = f"trial {number} is {record.state}{after}{value}; the sweep continues"
    elif gone:
        message = f"the sweep ended before trial {number} did; {SweepView(paths).resume_hint()}"
    else:
        message = (
            f"trial {number} has not ended after {seconds:g} s; it ends at its next step, "
            "or when the driver's grace period is over; "
            f"see: {paths.command('show', str(number))}"
        )
    return StopResult(paths.name, number, record.finished, record.state, message)


def _holder(paths: SweepPaths) -> LockOwner:
    holder = read_holder(paths.lock) if is_held(paths.lock) else None
    if holder is None:
        status = SweepView(paths)
        if status.holder is not None:
            raise NotRunningError(
                f"sweep '{paths.name}' is run by {status.holder.describe()} with another "
                f"directory than {paths.directory}; a stop request must be written to the "
                "driver's directory; stop the sweep on that host"
            )
        state = status.state
        after = f"; {status.resume_hint()}" * (state == "interrupted")
        raise NoDriverError(
            f"sweep '{paths.name}' is {state} and no driver runs it; only a running sweep can be "
            f"stopped{after}"
        )
    return holder


def _write_request(
    paths: SweepPaths, holder: LockOwner, request: Literal["drain", "now"] | str
) -> None:
    _wait(paths.control.is_dir, _BEGIN_SECONDS)
    (paths.control / f"{holder.token}-{request}").touch()


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def stop(
    view: SweepView,
    *,
    trial: int | None = None,
    now: bool = False,
    seconds: float = 120.0,
    say: Callable[[str], None] = lambda _: None,
) -> StopResult:
    """Stop a running sweep, whose trials save and can resume; or end one trial."""
    paths = view.paths
    if trial is None:
        return stop_sweep(paths, now=now, seconds=seconds, say=say)
    if now:
        raise NotRunningError(
            "--now and TRIAL exclude each other; a trial ends at its next step; "
            "leave one of them out"
        )
    try:
        return stop_trial(paths, trial, seconds=seconds, say=say)
    except NoDriverError:
        return end_trial(SweepView(paths), trial)


def end_trial(view: SweepView, number: int) -> StopResult:
    """End a trial that no worker trains: in the ledger first, then in the outbox."""
    paths, spec = view.paths, view.spec
    check_kept(paths, spec, spec)
    lock = SweepLock(paths.lock)
    lock.acquire()
    try:
        if lock.previous is not None:
            end_orphans(lock.previous.token)
        ledger = Ledger.open(paths.ledger)
        record = ledger.trial(number)
        state = trial_state(paths, spec, record, read_outbox(paths.outbox))
        # reports that its last worker stored and could not deliver
        report_missing(unreported(state), ledger)
        lineage = without_unbegun(record, paths).lineage
        record = ledger.finish(number, "pruned", reason=BY_THE_USER, lineage=lineage)
        queue_interruptions(paths, spec)
        close_stores([trial_files(paths, spec, number)])
    finally:
        lock.release()
    message = (
        f"trial {number} is {record.state} and does not resume; {SweepView(paths).resume_hint()}"
    )
    return StopResult(paths.name, number, record.finished, record.state, message)
