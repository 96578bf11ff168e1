"""Start a new sweep or resume one, and run it to its end or until it is interrupted.

What must not live here: running the trials (`run.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from sweeps.engine import fork_server
from sweeps.engine.cluster import Cluster, connected
from sweeps.engine.cluster_address import find_address
from sweeps.engine.resources import Machine, plan_sweep
from sweeps.engine.signals import exit_on_signal
from sweeps.engine.sweep_plan import make_plan
from sweeps.engine.system_limits import check_limits
from sweeps.engine.task_check import TaskInspector
from sweeps.errors import ExitRequested, Issue, LedgerError, LockLost, SweepExists, UserError
from sweeps.ledger.trials import of_search
from sweeps.ledger.warm_start import WarmStart, collect_warm_start, with_history
from sweeps.path_checks import check_writable
from sweeps.paths import SweepPaths
from sweeps.run.prepared import PreparedSweep, RunDisplay, RunOptions
from sweeps.run.store_comparison import has_lost_runs
from sweeps.run.task_code import enter_code_directory
from sweeps.search.dry_run import dry_run
from sweeps.spec.automatic import refuse_another_choice
from sweeps.spec.document import Document
from sweeps.spec.own_values import resolve_search
from sweeps.spec.revisions import is_unchanged, read_spec
from sweeps.spec.spec import SweepSpec, parse_with_positions
from sweeps.spec.trial_run import num_threads
from sweeps.stores import (
    check_address,
    check_below_root,
    check_kept,
    check_owner,
    check_webhook,
    find_tracker,
    probe_store,
    reach_tracking,
    remember_named,
    withheld_variables,
)
from sweeps.sweep_lock import is_held, read_holder, sweep_locked
from sweeps.view.outcome import SweepOutcome
from sweeps.view.sweep_view import SweepView
from tracking.outbox_status import read_outbox
from tracking.tracker import TrackingUnusable
from trainable.config import SPLIT_SEED
from trainable.errors import StorageError
from trainable.process_start import without_collection
from trainable.store.metrics_file import CurveDamaged


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
    options: RunOptions,
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
        spec, priors = with_history(paths, spec)
        if priors:
            display.warn(priors)
        display.doing("checking the search")
        dry_run(spec, collect_warm_start(paths.root, spec))
        return attempt(paths, spec, display, options, new=True)


def resume(
    view: SweepView, settings: Sequence[str], display: RunDisplay, options: RunOptions
) -> SweepOutcome:
    """Resume a sweep until it ends or is interrupted; does nothing if nothing is left to do."""
    paths, extra = view.paths, options.extra
    spec, document = read_again(view, settings, display.warn)
    asked = extra.choose(view.with_spec(spec)) or extra.reopens
    done = not asked and view.concluded and is_unchanged(view.spec, spec)
    if done and (options.offline or not has_lost_runs(view, display.warn)):
        return view.outcome()
    with document.attach_locations():
        display.doing("checking the search")
        dry_run(spec, WarmStart.from_data(view.ledger.warm_start()))
        return attempt(paths, spec, display, options, new=False)


def read_again(
    view: SweepView,
    settings: Sequence[str] = (),
    say: Callable[[str], object] = lambda _: None,
) -> tuple[SweepSpec, Document]:
    """Return the spec with which a sweep resumes, after the checks that need no task.

    Changes to the directory of the sweep's code, if the present one does not have it.
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
    paths: SweepPaths, spec: SweepSpec, display: RunDisplay, options: RunOptions, *, new: bool
) -> SweepOutcome:
    """Check the stores, the machine and the task, and run the trials."""
    outcomes: list[SweepOutcome] = []
    options = replace(options, address=find_address(options.address))
    try:
        with exit_on_signal(), ExitStack() as stack:
            prepared = _prepare(paths, spec, display, options, new=new, stack=stack)
            from sweeps.run.driver import run_sweep  # imports Ray: see `_prepare`

            run_sweep(prepared, display, outcomes.append)
    except ExitRequested:
        if not outcomes:
            raise
    except (CurveDamaged, LedgerError, LockLost, StorageError, OSError) as error:
        raise AttemptFailed(error) from error
    (outcome,) = outcomes
    return outcome


def _prepare(
    paths: SweepPaths,
    spec: SweepSpec,
    display: RunDisplay,
    options: RunOptions,
    *,
    new: bool,
    stack: ExitStack,
) -> PreparedSweep:
    """Check the stores, the machine and the task; `stack` ends what is started here."""
    display.doing("checking the stores")
    check_tracking(spec)
    check_webhook(spec)
    if not options.offline:
        reach_tracking(paths, spec)  # before any process starts
    if options.address is None:
        check_limits()
    display.doing("loading the task")
    machine: Machine | Cluster = Machine.probe()
    # Before the cluster's nodes are checked: a fault here is a fault there, too.
    probe_store(paths, spec, new=new)
    if options.address is not None:
        display.doing("connecting to the cluster")
        machine = stack.enter_context(
            connected(
                options.address,
                paths.root,
                spec,
                tell=display.warn,
                tell_last=display.cluster_unanswered,
            )
        )
        display.doing("loading the task")
    nodes = machine.nodes if isinstance(machine, Cluster) else (machine,)
    resources = plan_sweep(spec, nodes)
    if options.address is None:
        hidden = withheld_variables(spec)
        stack.enter_context(fork_server.serving(num_threads(resources.cpu), hidden))
    inspection = TaskInspector(spec, resources, resumed=not new)
    stack.callback(inspection.terminate)
    # While the child imports torch: so errors appear early, and so Ray is imported meanwhile.
    if not options.offline:
        _probe_tracking(paths, spec, new=new)
    with without_collection():
        import sweeps.run.driver  # noqa: F401  # `attempt` runs it

    display.doing("checking the task")
    facts = inspection.facts()
    if new:
        spec, cautions = resolve_search(spec, facts.default_arguments)
        facts = replace(facts, cautions=[*facts.cautions, *cautions])
    resources = plan_sweep(spec, nodes, facts.step_memory)
    memory = machine.memory if isinstance(machine, Machine) else None
    splits = SPLIT_SEED in {*facts.default_arguments, *spec.task.arguments}
    return PreparedSweep(
        paths=paths,
        spec=spec,
        options=replace(options, extra=options.extra.for_task(splits=splits)),
        new=new,
        machine=machine,
        resources=resources,
        facts=facts,
        plan=make_plan(spec, resources, facts, memory=memory),
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
