"""Start a new sweep or resume one, and run it to its end or until it is interrupted.

What must not live here: running the trials (`run.driver`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TextIO

from sweeps.below_root import check_below_root
from sweeps.checkpoint_locations import check_kept, probe_store
from sweeps.engine import fork_server
from sweeps.engine.cluster import Cluster, connected
from sweeps.engine.cluster_address import find_address
from sweeps.engine.resources import Machine, ResourcePlan, plan
from sweeps.engine.signals import exit_on_signal
from sweeps.engine.sweep_plan import SweepPlan, make_plan
from sweeps.engine.system_limits import check_limits
from sweeps.engine.task_check import TaskFacts, TaskInspector
from sweeps.errors import ExitRequested, Issue, LedgerError, LockLost, SweepExists, UserError
from sweeps.ledger.trials import TrialRecord, of_search
from sweeps.ledger.warm_start import WarmStart, collect_warm_start
from sweeps.path_checks import check_writable
from sweeps.paths import SweepPaths
from sweeps.reconcile.extra_training import NO_EXTRA, ExtraTraining
from sweeps.run.code_directory import enter_code_directory
from sweeps.run.lost_runs import has_lost_runs, warn_of_other_sweeps
from sweeps.search.dry_run import dry_run
from sweeps.spec.automatic import refuse_another_choice
from sweeps.spec.document import Document
from sweeps.spec.own_values import resolve_search
from sweeps.spec.provenance_check import Origin
from sweeps.spec.revisions import is_unchanged, read_spec
from sweeps.spec.spec import SweepSpec, parse_with_positions
from sweeps.spec.trial_run import num_threads
from sweeps.store_access import (
    check_owner,
    reach_tracking,
    remember_named,
    withheld_variables,
)
from sweeps.sweep_lock import is_held, read_holder, sweep_locked
from sweeps.tracker import check_address, find_tracker
from sweeps.view.observer import ProgressObserver, ShutdownNotices
from sweeps.view.outcome import SweepOutcome
from sweeps.view.remaining_time import DeliveryEstimate
from sweeps.view.sweep_status import SweepStatus
from sweeps.webhook import check_webhook
from tracking.outbox_status import read_outbox
from tracking.tracker import TrackingUnusable
from trainable.config import SPLIT_SEED
from trainable.errors import StorageError
from trainable.lazy_imports import without_collection
from trainable.metrics_file import CurveDamaged


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """What is known of a sweep right before its trials start."""

    spec: SweepSpec
    resources: ResourcePlan
    cluster: str | None
    """Describes the Ray cluster; None on one machine."""
    facts: TaskFacts
    plan: SweepPlan | None
    """What a new sweep will take; None for a resume."""
    delivery: DeliveryEstimate | None
    """How long the delivery takes after the training; None offline."""
    before: Sequence[TrialRecord]
    """The trials that earlier drivers have started."""
    num_trials: int


class RunDisplay(Protocol):
    """Shows how a sweep starts and runs."""

    notices: ShutdownNotices

    def doing(self, activity: str) -> None:
        """Something slow begins, in a few words."""

    def warn(self, message: str) -> None:
        """A warning that needs no action."""

    def begin(self, prepared: PreparedSweep) -> AbstractContextManager[ProgressObserver]:
        """The trials start; the observer receives their progress."""

    def cluster_unanswered(self, file: TextIO, message: str) -> None:
        """The cluster cannot be used: the process exits right after this call."""


class AttemptFailed(Exception):
    """The storage, the ledger or the lock failed under a sweep that was about to run, or ran."""

    def __init__(self, cause: CurveDamaged | LedgerError | LockLost | StorageError | OSError):
        super().__init__(str(cause))
        self.cause = cause


def start(
    paths: SweepPaths,
    file: Path,
    loaded: tuple[SweepSpec, Document],
    display: RunDisplay,
    *,
    grace: float,
    address: str | None = None,
    offline: bool = False,
) -> SweepOutcome:
    """Run a new sweep until it ends or is interrupted."""
    spec, document = loaded
    remember_named(spec, document, file)
    with document.attach_locations():
        check_writable(paths.root, "--root")
        if is_held(paths.lock):  # refuse early, before slow checks; acquiring the lock decides
            raise sweep_locked(paths.directory, read_holder(paths.lock))
        if paths.exists():
            raise SweepExists(paths)
        check_owner(paths.directory)
        check_below_root(paths, spec, display.warn)
        display.doing("checking the search")
        dry_run(spec, collect_warm_start(paths.root, spec))
        address = find_address(address)
        return attempt(
            paths, spec, display, new=True, grace=grace, address=address, offline=offline
        )


def resume(
    view: SweepStatus,
    settings: Sequence[str],
    display: RunDisplay,
    *,
    grace: float,
    address: str | None = None,
    accept_changes: bool = False,
    extra: ExtraTraining = NO_EXTRA,
    offline: bool = False,
) -> SweepOutcome:
    """Resume a sweep until it ends or is interrupted; does nothing if nothing is left to do."""
    paths = view.paths
    spec, document = read_again(view, settings, display.warn)
    asked = extra.choose(view.with_spec(spec)) or extra.reopens
    done = not asked and view.concluded and is_unchanged(view.spec, spec)
    if done and not has_lost_runs(view, display.warn, offline=offline):
        return view.outcome()
    with document.attach_locations():
        display.doing("checking the search")
        dry_run(spec, WarmStart.from_data(view.ledger.warm_start()))
        return attempt(
            paths,
            spec,
            display,
            new=False,
            grace=grace,
            address=find_address(address),
            accept_changes=accept_changes,
            extra=extra,
            offline=offline,
        )


def read_again(
    view: SweepStatus,
    settings: Sequence[str] = (),
    say: Callable[[str], object] = lambda _: None,
) -> tuple[SweepSpec, Document]:
    """Return the spec with which a sweep resumes, after the checks that need no task.

    The working directory becomes that of the sweep's code, if the present one does not have it.
    """
    paths = view.paths
    if view.running:  # refuse early, before slow checks; acquiring the lock decides
        raise sweep_locked(paths.directory, view.holder)
    spec, document = parse_with_positions(
        view.revision.text, str(paths.spec), settings, drawn=len(of_search(view.records))
    )
    with document.attach_locations():
        refuse_another_choice(document.choices)
    enter_code_directory(view, say)
    check_kept(paths, view.spec, spec)
    check_below_root(paths, spec, say)
    remember_named(spec, document)
    return spec, document


def attempt(
    paths: SweepPaths,
    spec: SweepSpec,
    display: RunDisplay,
    *,
    new: bool,
    grace: float,
    address: str | None = None,
    accept_changes: bool = False,
    extra: ExtraTraining = NO_EXTRA,
    offline: bool = False,
) -> SweepOutcome:
    """Check the stores, the machine and the task, and run the trials."""
    inspection: TaskInspector | None = None
    outcomes: list[SweepOutcome] = []
    try:
        with exit_on_signal(), ExitStack() as stack:
            display.doing("checking the stores")
            check_tracking(spec)
            check_webhook(spec)
            if not offline:
                reach_tracking(paths, spec)  # before any process starts
            if address is None:
                check_limits()
            display.doing("loading the task")
            machine: Machine | Cluster = Machine.probe()
            # Before the cluster's nodes are checked: a fault here is a fault there, too.
            probe_store(paths, spec, new=new)
            if address is not None:
                display.doing("connecting to the cluster")
                machine = stack.enter_context(_connect(address, paths, spec, display))
                display.doing("loading the task")
            nodes = machine.nodes if isinstance(machine, Cluster) else (machine,)
            workers = spec.searched_workers
            resource_plan = plan(
                spec.resources, spec.max_runs, spec.concurrency, nodes, workers=workers
            )
            if address is None:
                secrets = withheld_variables(spec)
                stack.enter_context(fork_server.serving(num_threads(resource_plan.cpu), secrets))
            inspection = TaskInspector(spec, resource_plan, resumed=not new)
            try:  # while the child imports torch, so that errors appear early
                if not offline:
                    _probe_tracking(paths, spec, new=new)
                    if new:
                        warn_of_other_sweeps(paths, spec, display.warn)
            except ValueError:
                inspection.terminate()
                raise

            with without_collection():
                # Ray, too, is imported while the child imports torch.
                from sweeps.run.driver import run_sweep

            display.doing("checking the task")
            facts = inspection.facts()
            if new:
                spec, cautions = resolve_search(spec, facts.default_arguments)
                facts = replace(facts, cautions=[*facts.cautions, *cautions])
            resource_plan = plan(
                spec.resources,
                spec.max_runs,
                spec.concurrency,
                nodes,
                facts.step_memory,
                workers=workers,
            )

            memory = machine.memory if isinstance(machine, Machine) else None
            sweep_plan = make_plan(spec, resource_plan, facts, memory=memory)

            def make_view(
                before: Sequence[TrialRecord], total: int
            ) -> AbstractContextManager[ProgressObserver]:
                return display.begin(
                    PreparedSweep(
                        spec=spec,
                        resources=resource_plan,
                        cluster=machine.describe() if isinstance(machine, Cluster) else None,
                        facts=facts,
                        plan=_with_free_disk(sweep_plan, paths, spec) if new else None,
                        delivery=None if offline else DeliveryEstimate.of(paths),
                        before=before,
                        num_trials=total,
                    )
                )

            run_sweep(
                paths,
                spec,
                resource_plan,
                machine,
                make_view,
                new=new,
                origin=Origin(facts.code, facts.data, facts.samples),
                accept_changes=accept_changes,
                extra=extra.for_task(
                    splits=SPLIT_SEED in {*facts.default_arguments, *spec.task.arguments}
                ),
                grace=grace,
                offline=offline,
                say=display.doing,
                warn=display.warn,
                notices=display.notices,
                expected=sweep_plan.expected(),
                tell=outcomes.append,
            )
    except ExitRequested:
        if inspection is not None:
            inspection.terminate()
        if not outcomes:
            raise
    except (CurveDamaged, LedgerError, LockLost, StorageError, OSError) as error:
        raise AttemptFailed(error) from error
    (outcome,) = outcomes
    return outcome


def _with_free_disk(found: SweepPlan, paths: SweepPaths, spec: SweepSpec) -> SweepPlan:
    free = None if spec.storage.checkpoints else shutil.disk_usage(paths.root).free
    return replace(found, disk_free_bytes=free)


def _connect(
    address: str, paths: SweepPaths, spec: SweepSpec, display: RunDisplay
) -> AbstractContextManager[Cluster]:
    return connected(
        address,
        paths.root,
        spec.trial_modules,
        store=spec.storage.checkpoints,
        hidden_env=withheld_variables(spec),
        tell=display.warn,
        tell_last=display.cluster_unanswered,
    )


def check_tracking(spec: SweepSpec) -> None:
    """Check that the tracking URI is valid; no server is contacted."""
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
