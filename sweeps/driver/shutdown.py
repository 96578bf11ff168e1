"""How a driver goes before its time: in peace, at once, or because its cluster is gone; and what
it leaves nobody.

What must not live here: how signals are heard (`interrupt`), how wishes are read (`control`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from sweeps.driver import stop_requests
from sweeps.engine.process_cleanup import kill_children
from sweeps.engine.signals import Interruption
from sweeps.exit_codes import NO_SUCCESS
from sweeps.paths import SweepPaths
from sweeps.reconciliation.repairs import close_stores
from sweeps.results import messages
from sweeps.sweep_lock import SweepLock
from trainable.files import LocalFiles

EXPORT = ".export-"
"""What the names of directories begin with in which a driver puts an export together."""


def make_signal_handler(
    paths: SweepPaths,
    lock: SweepLock,
    token: str,
    wishes: stop_requests.StopRequests,
    *,
    grace: float,
) -> Interruption:
    """What hears signals and wishes, and acts on them.

    Args:
        grace: Seconds from the first signal until the process has ended.
    """

    def look() -> None:
        wishes.look()
        if wishes.now:
            interruption.leave()
        if wishes.drain:
            interruption.drain()

    interruption = Interruption(
        on_first=lambda: _drain(paths, grace),
        on_last=lambda: _leave_at_once(paths, lock, token, interruption),
        grace=grace,
        look=look,
    )
    return interruption


def remove_scratch(paths: SweepPaths) -> None:
    """Remove what is of use to one driver only."""
    for directory in [paths.control, paths.ray, *paths.directory.glob(f"{EXPORT}*")]:
        shutil.rmtree(directory, ignore_errors=True)


def _drain(paths: SweepPaths, grace: float) -> None:
    with contextlib.suppress(OSError):  # a full disk: the trials then go back to their last save
        stop_requests.request_stop(paths)
    with contextlib.suppress(OSError):  # standard error may be a file there
        print(
            f"\nstopping: trials save at their next step and end, within {grace:g} s; "
            "another Ctrl-C leaves at once",
            file=sys.stderr,
            flush=True,
        )


def _leave_at_once(
    paths: SweepPaths, lock: SweepLock, token: str, interruption: Interruption
) -> None:
    """Kill what was started and go, without waiting for anything: all that is on disk is whole."""
    try:
        _kill_and_clean_up(paths, lock, token)
    finally:  # whatever that met, such as a directory that cannot be asked any more
        _exit(
            interruption.exit_code or 128 + signal.SIGINT,
            lambda: messages.exited_immediately(paths),
        )


def exit_on_cluster_loss(paths: SweepPaths, lock: SweepLock, token: str, cause: str) -> NoReturn:
    """Go, because the cluster is gone: Ray in this process would wait for it, and then end it."""
    try:
        _kill_and_clean_up(paths, lock, token)
    finally:  # as above
        _exit(NO_SUCCESS, lambda: messages.cluster_lost(paths, cause))


def _kill_and_clean_up(paths: SweepPaths, lock: SweepLock, token: str) -> None:
    lock.block_writers()  # Tune would have new workers for those that end now
    kill_children(token)
    if lock.is_ours():  # what lies there is otherwise another driver's
        remove_scratch(paths)
        # An object store is not asked: an upload that was broken off goes when its trial goes on.
        close_stores(map(LocalFiles.of, paths.directory.glob("trials/*")))
    lock.release_local()


def _exit(code: int, say: Callable[[], None]) -> NoReturn:
    try:
        with contextlib.suppress(OSError):  # standard error may be a file on a full disk
            say()
    finally:
        os._exit(code)
