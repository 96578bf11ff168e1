"""Shut a driver down early: graceful, forced and Ray-loss shutdown, and scratch clean-up.

What must not live here: receiving signals (`signals`), and reading stop requests
(`stop_requests`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from sweeps.driver import stop_requests
from sweeps.engine.process_cleanup import kill_children
from sweeps.engine.signals import Interruption
from sweeps.exit_codes import NO_SUCCESS
from sweeps.paths import SCRATCH, SweepPaths
from sweeps.reconciliation.repairs import close_stores
from sweeps.results.observer import ShutdownNotices
from sweeps.sweep_lock import SweepLock
from trainable.storage.local import LocalFiles

_EXITS = threading.Lock()
"""Only one thread exits the process: the signals' or the one that watches Ray."""


def make_signal_handler(
    paths: SweepPaths,
    lock: SweepLock,
    token: str,
    requests: stop_requests.StopRequests,
    *,
    grace: float,
    notices: ShutdownNotices,
) -> Interruption:
    """Return the handler that acts on signals and stop requests.

    Args:
        paths: The sweep's directory.
        lock: The sweep's lock, which this driver holds.
        token: The lock's token, which tags this driver's processes.
        requests: The stop requests from other processes.
        grace: Seconds from the first signal until the process has ended.
        notices: Receives what the user should know.
    """

    def look() -> None:
        requests.look()
        if requests.now:
            interruption.leave()
        if requests.drain:
            interruption.drain()

    interruption = Interruption(
        on_first=lambda: _drain(paths, grace, notices),
        on_last=lambda: _exit_immediately(paths, lock, token, interruption, notices),
        grace=grace,
        look=look,
    )
    return interruption


def remove_scratch(paths: SweepPaths) -> None:
    """Remove the files that only one driver uses."""
    for directory in [paths.control, paths.ray, *paths.directory.glob(f"{SCRATCH}*")]:
        shutil.rmtree(directory, ignore_errors=True)


def _drain(paths: SweepPaths, grace: float, notices: ShutdownNotices) -> None:
    # If a full disk prevents the stop file, trials resume from their last checkpoint.
    with contextlib.suppress(OSError):
        stop_requests.request_stop(paths)
    with contextlib.suppress(OSError):  # standard error may be a file on the full disk
        notices.stopping(grace)


def _exit_immediately(
    paths: SweepPaths,
    lock: SweepLock,
    token: str,
    interruption: Interruption,
    notices: ShutdownNotices,
) -> None:
    """Kill the driver's processes and exit without waiting: files on disk are always complete."""
    _exit(
        paths,
        lock,
        token,
        interruption.exit_code or 128 + signal.SIGINT,
        lambda: notices.exited_immediately(paths),
    )


def exit_on_ray_loss(
    paths: SweepPaths,
    lock: SweepLock,
    token: str,
    interruption: Interruption,
    notices: ShutdownNotices,
    cause: str,
) -> NoReturn:
    """Exit because the local Ray or the cluster is lost.

    Without this, Ray in this process waits for it and then ends the process.

    Args:
        paths: The sweep's directory.
        lock: The sweep's lock, which this driver holds.
        token: The lock's token, which tags this driver's processes.
        interruption: Says whether a signal, which may have ended Ray as well, came first.
        notices: Receives what the user should know.
        cause: Why Ray counts as lost, for the message.
    """
    _exit(
        paths,
        lock,
        token,
        interruption.exit_code or NO_SUCCESS,
        lambda: notices.ray_lost(paths, cause),
    )


def _exit(
    paths: SweepPaths, lock: SweepLock, token: str, code: int, say: Callable[[], None]
) -> NoReturn:
    with _EXITS:
        try:
            _kill_and_clean_up(paths, lock, token)
        finally:  # exit even after an error, such as an unreadable directory
            try:
                with contextlib.suppress(OSError):  # standard error may be a file on a full disk
                    say()
            finally:
                os._exit(code)


def _kill_and_clean_up(paths: SweepPaths, lock: SweepLock, token: str) -> None:
    lock.block_writers()  # otherwise Tune would start new workers for the killed ones
    kill_children(token)
    if lock.is_ours():  # otherwise the files belong to another driver
        remove_scratch(paths)
        # Object stores stay as they are: a trial removes its aborted upload when it resumes.
        close_stores(map(LocalFiles.of, paths.directory.glob("trials/*")))
    lock.release()
