"""Run a sweep: `run`, `resume` and adding trials are the same operation.

What must not live here: Ray Tune's loop over trials (`tune_loop`), opening and repairing a sweep
(`session`), and what is published at the end (`finalize`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import NoReturn

from sweeps.engine import local_ray
from sweeps.engine.cluster import Cluster
from sweeps.engine.node_notice import NoticeHandlers, watching
from sweeps.engine.process_cleanup import clean_up_dead_drivers, kill_children, tag_child_processes
from sweeps.engine.resources import Machine
from sweeps.engine.signals import Interruption
from sweeps.errors import NO_SUCCESS, LedgerError, SweepExists
from sweeps.paths import SCRATCH, SweepPaths
from sweeps.reconcile.failure_policy import RepeatedFailure
from sweeps.reconcile.repairs import close_stores
from sweeps.run import stop_requests
from sweeps.run.finalize import finalize_attempt
from sweeps.run.prepared import PreparedSweep, RunDisplay
from sweeps.run.session import SweepSession, open_sweep
from sweeps.run.stop_requests import StopRequests
from sweeps.run.tune_loop import TrialLoop
from sweeps.run.worker_watch import START_SECONDS, WorkerRules
from sweeps.spec.revisions import describe_changes, read_spec
from sweeps.spec.spec import SweepSpec
from sweeps.stores import withheld_variables
from sweeps.sweep_lock import SweepLock
from sweeps.view.observer import ShutdownNotices
from sweeps.view.outcome import SweepOutcome
from tracking.outbox_file import OutboxError
from trainable.errors import StorageError
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import CurveDamaged
from trainable.store.regular_files import make_directory

_LAST_NOTIFICATION_SECONDS = 5.0
"""The time limit for notifications when the driver ends with an error."""


def run_sweep(
    prepared: PreparedSweep, display: RunDisplay, tell: Callable[[SweepOutcome], None]
) -> None:
    """Run a sweep to its end, or until it is interrupted; `tell` receives the outcome."""
    paths, new = prepared.paths, prepared.new
    with (
        _acquired_lock(paths) as lock,
        _listening(prepared, lock, display.notices) as (requests, interruption),
    ):
        if new and paths.exists():
            raise SweepExists(paths)
        _take_over_processes(lock, prepared.machine)
        before = prepared.spec if new else read_spec(paths.spec).spec
        sweep = open_sweep(prepared, lock.check, display.warn)
        driver = _Driver(sweep, prepared, display, lock, requests, interruption)
        try:
            _reconcile(sweep, before, display.warn)
            if sweep.trials().num_left:
                sweep.ledger.store_plan(prepared.plan.expected())
            driver.run_and_finalize(tell)
        except (CurveDamaged, LedgerError, OSError, StorageError) as error:
            _notify_failure(sweep, error)
            raise
        finally:
            sweep.recorder.close(timeout=0.0)
            if sweep.notifications:
                sweep.notifications.delivery.close(timeout=0.0)


@contextmanager
def _acquired_lock(paths: SweepPaths) -> Iterator[SweepLock]:
    """Hold the sweep's lock, and remove the driver's scratch files before and after."""
    lock = SweepLock(paths.lock)
    lock.acquire()
    try:
        remove_scratch(paths)
        yield lock
    finally:
        if lock.is_ours():  # otherwise the files there belong to another driver
            remove_scratch(paths)
        lock.release()


@contextmanager
def _listening(
    prepared: PreparedSweep, lock: SweepLock, notices: ShutdownNotices
) -> Iterator[tuple[StopRequests, Interruption]]:
    """Accept stop requests, and handle signals."""
    paths, grace = prepared.paths, prepared.options.grace
    requests = StopRequests(paths, lock.token)
    with make_signal_handler(paths, lock, requests, grace=grace, notices=notices) as interruption:
        yield requests, interruption


def _take_over_processes(lock: SweepLock, machine: Machine | Cluster) -> None:
    """End the processes of a dead driver, and tag those that this driver will start."""
    clean_up_dead_drivers(*([lock.previous.token] if lock.previous else []))
    if isinstance(machine, Cluster):
        tag_child_processes(lock.token)
    else:
        local_ray.configure(lock.token)


def _notify_failure(sweep: SweepSession, error: Exception) -> None:
    """Notify that the driver ends with an error. If the disk is full, there is no notification."""
    if sweep.notifications:
        with suppress(OutboxError, LedgerError):
            sweep.notifications.notifier.sweep_ended("FAILED", str(error))
            sweep.notifications.delivery.close(timeout=_LAST_NOTIFICATION_SECONDS)


def _reconcile(sweep: SweepSession, before: SweepSpec, warn: Callable[[str], None]) -> None:
    """Repair what an earlier driver left unfinished, and report how a resume changes the spec."""
    if changed := describe_changes(before, sweep.spec):
        warn(f"changed: {changed}")
    sweep.recorder.artifact(None, sweep.paths.spec, sweep.paths.spec.name)
    sweep.reconcile(warn)
    if warning := sweep.no_effect_warning(before):
        warn(warning)


@dataclass(frozen=True)
class _Driver:
    """An open sweep, and the objects that this process needs to run it."""

    sweep: SweepSession
    prepared: PreparedSweep
    display: RunDisplay
    lock: SweepLock
    requests: StopRequests
    interruption: Interruption

    def run_and_finalize(self, tell: Callable[[SweepOutcome], None]) -> None:
        """Run the remaining trials, then publish the best one and deliver to tracking."""
        sweep = self.sweep
        abort_reason = None
        if sweep.has_trials_to_run() and not self.interruption.requested:
            abort_reason = self._run_trials()
        self.lock.check()
        tell(finalize_attempt(sweep, self.interruption, abort_reason, self.display.doing))

    def _run_trials(self) -> RepeatedFailure | None:
        """Start Ray, run trials, and close the checkpoint stores that killed workers left open."""
        sweep, prepared, abort_reason = self.sweep, self.prepared, None
        self.display.doing("starting Ray")
        make_directory(sweep.paths.trial(0).parent)  # each worker makes its trial's directory
        leaving: set[str] = set()
        with self._engine() as node_died, self._watching_for_notices(leaving):
            if not self.interruption.requested:  # a signal can come while Ray starts
                before = sweep.ledger.trials()
                is_local = isinstance(prepared.machine, Machine)
                workers = WorkerRules(
                    node_died=node_died,
                    start_seconds=START_SECONDS if is_local else math.inf,
                    grace=self.interruption.grace,
                    leaving=leaving,
                )
                with self.display.begin(prepared, before, sweep.most_trials()) as observer:
                    loop = TrialLoop(
                        sweep,
                        prepared.resources,
                        observer,
                        self.interruption,
                        self.requests,
                        workers,
                    )
                    abort_reason = loop.run()
            self.display.doing("stopping Ray")
            sweep.recorder.flush(0.0)  # no trial needs the processor: its process may have it
        self.lock.check()  # otherwise the stores belong to the workers of another driver
        sweep.close_stores()
        return abort_reason

    def _engine(self) -> AbstractContextManager[Callable[[Exception | None], bool]]:
        """Return a context that runs a local Ray or uses the cluster, and exits if it is lost.

        It yields a function that says whether an actor was lost with its whole node.
        """
        machine, concurrency = self.prepared.machine, self.prepared.resources.max_concurrency
        if isinstance(machine, Cluster):
            return machine.running(concurrency, self._exit_on_loss)
        return local_ray.running(
            self.lock.token,
            machine,
            concurrency=concurrency,
            interruption=self.interruption,
            lost=self._exit_on_loss,
            hidden_env=withheld_variables(self.sweep.spec),
        )

    def _watching_for_notices(self, leaving: set[str]) -> AbstractContextManager[None]:
        """Return a context in which trials leave machines that are about to be taken away.

        The ids of nodes that get notice are added to `leaving`.
        """
        in_cluster, warn = isinstance(self.prepared.machine, Cluster), self.display.warn

        def leave() -> None:
            which = "this machine, or the cluster's head," if in_cluster else "this machine"
            warn(f"{which} is about to be taken away")
            self.interruption.drain(signal.SIGTERM)

        def move(node: str, address: str) -> None:
            stop_requests.request_move(self.sweep.paths, node)
            leaving.add(node)
            warn(
                f"node {address} is about to be taken away: its trials save at their next step, "
                "and continue on other nodes"
            )

        rules = self.sweep.spec.preemption
        handlers = NoticeHandlers(leave, move, warn)
        return watching(rules.command, rules.every, handlers, in_cluster=in_cluster)

    def _exit_on_loss(self, cause: str) -> NoReturn:
        """Exit because the local Ray or the cluster is lost: Ray would wait without an end."""
        paths, code = self.sweep.paths, self.interruption.exit_code or NO_SUCCESS
        _exit(paths, self.lock, code, lambda: self.display.notices.ray_lost(paths, cause))


_EXITS = threading.Lock()
"""Only one thread exits the process: the signals' or the one that watches Ray."""


def make_signal_handler(
    paths: SweepPaths,
    lock: SweepLock,
    requests: StopRequests,
    *,
    grace: float,
    notices: ShutdownNotices,
) -> Interruption:
    """Return the handler that acts on signals and stop requests."""

    def look() -> None:
        requests.look()
        if requests.now:
            interruption.leave()
        if requests.drain:
            interruption.drain()

    interruption = Interruption(
        on_first=lambda: _drain(paths, grace, notices),
        on_last=lambda: _exit(
            paths,
            lock,
            interruption.exit_code or 128 + signal.SIGINT,
            lambda: notices.exited_immediately(paths),
        ),
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


def _exit(paths: SweepPaths, lock: SweepLock, code: int, say: Callable[[], None]) -> NoReturn:
    """Kill the driver's processes and exit without waiting: files on disk are always complete."""
    with _EXITS:
        try:
            _kill_and_clean_up(paths, lock)
        finally:  # exit even after an error, such as an unreadable directory
            try:
                with contextlib.suppress(OSError):  # standard error may be a file on a full disk
                    say()
            finally:
                os._exit(code)


def _kill_and_clean_up(paths: SweepPaths, lock: SweepLock) -> None:
    lock.block_writers()  # otherwise Tune would start new workers for the killed ones
    kill_children(lock.token)
    if lock.is_ours():  # otherwise the files belong to another driver
        remove_scratch(paths)
        # Object stores stay as they are: a trial removes its aborted upload when it resumes.
        close_stores(map(LocalFiles.of, paths.directory.glob("trials/*")))
    lock.release()
