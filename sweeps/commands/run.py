"""One attempt at a sweep, as `sweep run` and `sweep resume` make it: check, run, say how it ended.

What must not live here: options and arguments (`cli`), the run itself (`run`).
"""

from __future__ import annotations

import errno
import shutil
from contextlib import AbstractContextManager, ExitStack

from rich.console import Console

from sweeps.checkpoint_locations import probe_store
from sweeps.commands import messages
from sweeps.commands.lost_runs import name_other_sweeps
from sweeps.config.provenance_check import Origin
from sweeps.config.revisions import read_spec
from sweeps.config.spec import SweepSpec
from sweeps.engine import fork_server
from sweeps.engine.cluster import Cluster, connected
from sweeps.engine.resources import Machine, plan
from sweeps.engine.signals import ExitRequested, exit_on_signal
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
from sweeps.paths import SweepPaths
from sweeps.results.sweep_status import SweepOutcome
from sweeps.store_access import reach_tracking
from sweeps.tracker import check_address, find_tracker
from tracking.address import credentials
from tracking.outbox_file import OutboxError
from tracking.outbox_status import read_outbox
from tracking.tracker import TrackingUnusable
from trainable.errors import StorageError
from trainable.lazy_imports import without_collection
from trainable.metrics_file import CurveDamaged
from trainable.storage.regular_files import IrregularFile

_REFUSED = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
"""What a storage answers that is full or read-only."""


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
    offline: bool = False,
) -> int:
    """Run a sweep to its end or until it is interrupted, and say what comes next.

    Args:
        out: Where the sweep is shown.
        err: Where everything else is said.
        new: Whether the sweep must not exist yet; otherwise it must.
        grace: Seconds from the first signal until the process has ended.
        address: The Ray cluster to run on; None: a Ray of this machine's own.
        accept_changes: Go on although code, data or what values mean has changed.
        offline: Ask no tracking server: everything stays in the outbox.

    Returns:
        The exit code.

    Raises:
        ValueError: One of its subclasses: the user can put it right, and nothing was created.
        SweepHeld: Another driver holds it.
    """
    inspection: TaskInspector | None = None
    outcomes: list[SweepOutcome] = []
    try:
        with exit_on_signal(), err.status("loading the task") as spinner, ExitStack() as stack:
            check_tracking(spec)
            if not offline:
                reach_tracking(paths, spec)  # before anything is started
            if address is None:
                check_limits()
            where: Machine | Cluster = Machine.probe()
            # Before the cluster's nodes are asked: what is wrong here is wrong there, too.
            probe_store(paths, spec, new=new)
            if address is not None:
                spinner.update("connecting to the cluster")
                where = stack.enter_context(_connected(address, paths, spec, err))
                spinner.update("loading the task")
            nodes = where.nodes if isinstance(where, Cluster) else (where,)
            ways = plan(spec.resources, spec.trials, spec.concurrency, nodes)
            if address is None:
                secrets = credentials(spec.tracking.uri, spec.storage.ledger)
                stack.enter_context(fork_server.serving(max(1, int(ways.cpu)), secrets))
            inspection = TaskInspector(spec, ways)
            try:  # asked while the child imports torch: who is refused hears it soon
                if not offline:
                    _probe_tracking(paths, spec, new=new)
                    if new:
                        name_other_sweeps(paths, spec, err)
            except ValueError:
                inspection.terminate()
                raise

            with without_collection():
                from sweeps.commands.progress_display import PlainLines, ProgressTable, view_on
                from sweeps.driver.run import (
                    run_sweep,  # imports Ray while the child imports torch
                )

            facts = inspection.facts()
            ways = plan(spec.resources, spec.trials, spec.concurrency, nodes, facts.step_memory)

            def make_view(
                finished: int, total: int, best: tuple[int, float] | None
            ) -> ProgressTable | PlainLines:
                spinner.stop()
                there = f", {where.describe()}" if isinstance(where, Cluster) else ""
                messages.sentence(err, f"  {ways.describe()}{there}", style="")
                messages.task_facts(err, facts)
                return view_on(out, spec, finished=finished, total=total, best=best)

            def say(what: str) -> None:
                spinner.update(what)
                spinner.start()

            run_sweep(
                paths,
                spec,
                ways,
                where,
                make_view,
                new=new,
                origin=Origin(facts.code, facts.data, facts.samples),
                accept_changes=accept_changes,
                grace=grace,
                offline=offline,
                say=say,
                warn=lambda message: messages.sentence(err, message, style="yellow"),
                notices=messages.ConsoleNotices(),
                tell=outcomes.append,
            )
    except ExitRequested as left:
        if inspection is not None:
            inspection.terminate()
        if not outcomes:
            if new and paths.exists():
                messages.interrupted(err, paths)
            else:
                messages.nothing_started(err)
            return left.exit_code
    except (CurveDamaged, LedgerError, LockLost, StorageError, OSError) as error:
        return give_up(error, paths, err)
    (outcome,) = outcomes
    messages.outcome(out, err, outcome, paths)
    return outcome.exit_code


def _connected(
    address: str, paths: SweepPaths, spec: SweepSpec, err: Console
) -> AbstractContextManager[Cluster]:
    return connected(
        address,
        paths.root,
        spec.trial_modules,
        store=spec.storage.checkpoints,
        hidden_env=credentials(spec.tracking.uri, spec.storage.ledger),
        tell=lambda message: messages.sentence(err, message, style="yellow"),
        tell_last=messages.cluster_unanswered,
    )


def check_tracking(spec: SweepSpec) -> None:
    """See that a sweep's tracking address names a store; nobody is asked.

    Raises:
        Refused: It names none.
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
            raise  # what lies below the root is no key's doing
        raise UserError([Issue(("tracking", "uri"), error.message)]) from error


def _is_known(paths: SweepPaths, spec: SweepSpec, *, new: bool) -> bool:
    """Whether the tracking address needs no proof: our own store, or one recorded at before."""
    if spec.tracking.uri is None:
        return True
    if new:
        return False
    before = read_spec(paths.spec).spec.tracking.uri
    return before == spec.tracking.uri and read_outbox(paths.outbox).experiment_id is not None


def give_up(
    error: CurveDamaged | LedgerError | LockLost | StorageError | OSError,
    paths: SweepPaths,
    err: Console,
) -> int:
    """Say why a sweep could not go on, and what continues it if there is one by now.

    Returns:
        The exit code: a storage that fails under a sweep stops it; one that fails before there is
        a sweep, and a ledger or a curve that is damaged, are for the user to put right first.
    """
    code = WRONG_INPUT
    if isinstance(error, LedgerBusy | LockLost):
        code = HELD
    elif isinstance(error, IrregularFile | LockTaken):
        pass  # for the user to put right, whether or not there is a sweep
    elif isinstance(error, LedgerRefused | StorageError | OSError) and paths.exists():
        code = NO_SUCCESS
    cause = str(error)
    if isinstance(error, OSError) and not isinstance(error, OutboxError):
        cause = _with_room(error, paths)
    messages.sentence(err, f"stopped: {cause}" if code == NO_SUCCESS else cause, style="red")
    if paths.exists():
        messages.resume(err, paths)
    return code


def _with_room(error: OSError, paths: SweepPaths) -> str:
    """What the system says about a file, made the sentence of all storages that fail."""
    if error.errno not in _REFUSED or not paths.exists():
        return str(error)
    free = shutil.disk_usage(paths.directory).free
    return (
        f"{paths.directory} cannot be written: {error}; {free} bytes are free on that disk; what "
        "was saved is untouched; free space or correct the permissions, then resume"
    )
