"""`sweep run` and `sweep resume`: check a sweep, run it, and print its outcome.

What must not live here: options and arguments (`cli`), and running the trials (`driver.run`).
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack

from rich.console import Console
from rich.status import Status

from sweeps.checkpoint_locations import probe_store
from sweeps.commands import messages
from sweeps.commands.lost_runs import warn_of_other_sweeps
from sweeps.config.provenance_check import Origin
from sweeps.config.revisions import read_spec
from sweeps.config.spec import SweepSpec
from sweeps.config.trial_run import num_threads
from sweeps.engine import fork_server
from sweeps.engine.cluster import Cluster, connected
from sweeps.engine.resources import Machine, plan
from sweeps.engine.signals import ExitRequested, exit_on_signal
from sweeps.engine.sweep_plan import make_plan
from sweeps.engine.system_limits import check_limits
from sweeps.engine.task_check import TaskInspector
from sweeps.errors import (
    Issue,
    LedgerBusy,
    LedgerError,
    LedgerRefused,
    LockLost,
    LockTaken,
    UserError,
)
from sweeps.exit_codes import HELD, NO_SUCCESS, WRONG_INPUT
from sweeps.ledger.reader import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.results.findings import Findings, find
from sweeps.results.sweep_status import SweepOutcome, SweepStatus
from sweeps.store_access import reach_tracking, withheld_variables
from sweeps.tracker import check_address, find_tracker
from sweeps.webhook import check_webhook
from tracking.outbox_file import OutboxError
from tracking.outbox_status import backlog, read_outbox
from tracking.tracker import TrackingUnusable
from trainable.errors import StorageError
from trainable.lazy_imports import without_collection
from trainable.metrics_file import CurveDamaged
from trainable.storage.regular_files import IrregularFile

_REFUSED = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
"""Errors of a full or read-only storage."""


def attempt(
    paths: SweepPaths,
    spec: SweepSpec,
    out: Console,
    err: Console,
    *,
    new: bool,
    grace: float,
    address: str | None = None,
    accept_changes: bool = False,
    finish: Sequence[int] = (),
    offline: bool = False,
    spinner: Status | None = None,
) -> int:
    """Run a sweep until it ends or is interrupted, and print its outcome.

    Args:
        paths: The sweep's directory.
        spec: The spec to run; of a resumed sweep, with its changes.
        out: Receives the progress display and the results.
        err: Receives messages and warnings.
        new: Whether the sweep must not exist yet; otherwise it must.
        grace: Seconds from the first signal until the process has ended.
        address: The Ray cluster to run on; None: start a local Ray.
        accept_changes: Resume although code, data or the meaning of values has changed.
        finish: Numbers of pruned trials to train to their end.
        offline: Contact no tracking server; everything stays in the outbox.
        spinner: Says what time is spent on, and is stopped at the end; None: make one.

    Returns:
        The exit code.

    Raises:
        ValueError: A subclass, for input that the user can correct; nothing was created.
        SweepLockedError: Another driver holds the sweep.
    """
    inspection: TaskInspector | None = None
    outcomes: list[SweepOutcome] = []
    spinner = spinner or err.status("")
    try:
        with exit_on_signal(), spinner, ExitStack() as stack:
            spinner.update("checking the stores")
            check_tracking(spec)
            check_webhook(spec)
            if not offline:
                reach_tracking(paths, spec)  # before any process starts
            if address is None:
                check_limits()
            spinner.update("loading the task")
            machine: Machine | Cluster = Machine.probe()
            # Before the cluster's nodes are checked: a fault here is a fault there, too.
            probe_store(paths, spec, new=new)
            if address is not None:
                spinner.update("connecting to the cluster")
                machine = stack.enter_context(_connect(address, paths, spec, err))
                spinner.update("loading the task")
            nodes = machine.nodes if isinstance(machine, Cluster) else (machine,)
            resource_plan = plan(spec.resources, spec.trials, spec.concurrency, nodes)
            if address is None:
                secrets = withheld_variables(spec)
                stack.enter_context(fork_server.serving(num_threads(resource_plan.cpu), secrets))
            inspection = TaskInspector(spec, resource_plan, resumed=not new)
            try:  # while the child imports torch, so that errors appear early
                if not offline:
                    _probe_tracking(paths, spec, new=new)
                    if new:
                        warn_of_other_sweeps(paths, spec, err)
            except ValueError:
                inspection.terminate()
                raise

            with without_collection():
                from sweeps.commands.progress_display import PlainLines, ProgressTable, view_on
                from sweeps.driver.run import (
                    run_sweep,  # Ray, too, is imported while the child imports torch
                )
                from sweeps.results.remaining_time import DeliveryEstimate

            spinner.update("checking the task")
            facts = inspection.facts()
            resource_plan = plan(
                spec.resources, spec.trials, spec.concurrency, nodes, facts.step_memory
            )

            def make_view(before: Sequence[TrialRecord], total: int) -> ProgressTable | PlainLines:
                spinner.stop()
                cluster = f", {machine.describe()}" if isinstance(machine, Cluster) else ""
                messages.sentence(err, f"  {resource_plan.describe()}{cluster}", style="")
                messages.task_facts(err, facts)
                if new:
                    sweep_plan = make_plan(
                        spec,
                        resource_plan,
                        facts,
                        memory=machine.memory if isinstance(machine, Machine) else None,
                        disk_free=shutil.disk_usage(paths.root).free,
                    )
                    messages.plan(err, spec, sweep_plan)
                delivery = None if offline else DeliveryEstimate(lambda: backlog(paths.outbox))
                return view_on(out, spec, before, total=total, delivery=delivery)

            def say(activity: str) -> None:
                spinner.update(activity)
                spinner.start()

            run_sweep(
                paths,
                spec,
                resource_plan,
                machine,
                make_view,
                new=new,
                origin=Origin(facts.code, facts.data, facts.samples),
                accept_changes=accept_changes,
                finish=finish,
                grace=grace,
                offline=offline,
                say=say,
                warn=lambda message: messages.sentence(err, message, style="yellow"),
                notices=messages.ConsoleNotices(),
                tell=outcomes.append,
            )
    except ExitRequested as request:
        if inspection is not None:
            inspection.terminate()
        if not outcomes:
            if new and paths.exists():
                messages.interrupted(err, paths)
            else:
                messages.nothing_started(err)
            return request.exit_code
    except (CurveDamaged, LedgerError, LockLost, StorageError, OSError) as error:
        return report_error(error, paths, err)
    (outcome,) = outcomes
    messages.outcome(out, err, outcome, paths, _findings(paths, outcome))
    return outcome.exit_code


def _findings(paths: SweepPaths, outcome: SweepOutcome) -> Findings | None:
    """Return what an ended sweep found; None if it was interrupted, or cannot be read now."""
    if outcome.exit_code not in (0, NO_SUCCESS) or outcome.num_left:
        return None
    try:
        return find(SweepStatus(paths))
    except (LedgerError, OSError):  # the sweep itself has ended well
        return None


def _connect(
    address: str, paths: SweepPaths, spec: SweepSpec, err: Console
) -> AbstractContextManager[Cluster]:
    return connected(
        address,
        paths.root,
        spec.trial_modules,
        store=spec.storage.checkpoints,
        hidden_env=withheld_variables(spec),
        tell=lambda message: messages.sentence(err, message, style="yellow"),
        tell_last=messages.cluster_unanswered,
    )


def check_tracking(spec: SweepSpec) -> None:
    """Check that the tracking URI is valid; no server is contacted.

    Raises:
        UserError: It is not.
    """
    try:
        check_address(spec)
    except TrackingUnusable as error:
        raise UserError([Issue(("tracking", "uri"), error.message)]) from error


def _probe_tracking(paths: SweepPaths, spec: SweepSpec, *, new: bool) -> None:
    tracker = find_tracker(paths, spec)
    try:
        tracker.probe(known=_is_known(paths, spec, new=new))
    except TrackingUnusable as error:
        if spec.tracking.uri is None:
            raise  # no key of the spec names the store below the root
        raise UserError([Issue(("tracking", "uri"), error.message)]) from error


def _is_known(paths: SweepPaths, spec: SweepSpec, *, new: bool) -> bool:
    """Whether the tracking store is the embedded one, or one that has recorded this sweep."""
    if spec.tracking.uri is None:
        return True
    if new:
        return False
    before = read_spec(paths.spec).spec.tracking.uri
    return before == spec.tracking.uri and read_outbox(paths.outbox).experiment_id is not None


def report_error(
    error: CurveDamaged | LedgerError | LockLost | StorageError | OSError,
    paths: SweepPaths,
    err: Console,
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
    if isinstance(error, OSError) and not isinstance(error, OutboxError):
        cause = _describe_full_disk(error, paths)
    messages.sentence(err, f"stopped: {cause}" if code == NO_SUCCESS else cause, style="red")
    if paths.exists():
        first = "when the other process has ended" if code == HELD else "when this is corrected"
        messages.sentence(err, f"{first}, continue with:", style="")
        messages.resume(err, paths)
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
