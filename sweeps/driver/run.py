"""Running a sweep: `run`, `resume` and `extend` are the same operation.

Take the lock; clean up after a dead driver; open the ledger and put right what was left half
done; start a fresh Tuner whose searcher first hands out the unfinished trials and then asks for
new ones; tell the scheduler the past; record; publish the best. Ray's own directory is thrown
away at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from sweeps.config.provenance_check import Origin
from sweeps.config.revisions import describe_changes, read_spec
from sweeps.config.spec import SweepSpec
from sweeps.driver.finalize import finalize_attempt
from sweeps.driver.session import open_sweep
from sweeps.driver.shutdown import exit_on_cluster_loss, make_signal_handler, remove_scratch
from sweeps.driver.stop_requests import StopRequests
from sweeps.driver.tune_loop import tune_trials
from sweeps.engine import local_ray
from sweeps.engine.cluster import Cluster
from sweeps.engine.process_cleanup import clean_up_dead_drivers, tag_child_processes
from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.ledger.ledger import TrialRecord
from sweeps.ledger.location import ledger_location
from sweeps.paths import SweepExists, SweepPaths
from sweeps.publishing.figure_worker import FigureWorkerPool
from sweeps.publishing.report_worker import ReportWorker
from sweeps.results.observer import ProgressObserver
from sweeps.results.sweep_status import SweepOutcome
from sweeps.sweep_lock import SweepLock
from tracking.address import credentials
from trainable.files import make_directory

ViewFactory = Callable[
    [int, int, tuple[int, float] | None], AbstractContextManager[ProgressObserver]
]
"""Makes the view, given how many trials were finished before, of how many in all, and the best one
and its value."""


def run_sweep(
    paths: SweepPaths,
    spec: SweepSpec,
    plan: ResourcePlan,
    machine: Machine | Cluster,
    make_view: ViewFactory,
    *,
    new: bool,
    origin: Origin | None = None,
    accept_changes: bool = False,
    grace: float = 30.0,
    offline: bool = False,
    say: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
    tell: Callable[[SweepOutcome], None],
) -> None:
    """Run a sweep to its end, or until it is interrupted.

    Args:
        paths: Where the sweep lives.
        spec: What to run; for a resumed sweep, with what was changed.
        plan: Resources per trial and how many at once.
        machine: What a local Ray may use, or the cluster that this process is connected to.
        new: Whether the sweep must not exist yet; otherwise it must.
        origin: What its trials are run from; None leaves that unknown.
        accept_changes: Go on although code, data or what values mean has changed.
        grace: Seconds from the first signal until this process has ended; trials have most of
            them to save their state.
        offline: Ask no tracking server: everything stays in the outbox.
        say: Told in a few words what is happening when it takes long.
        warn: Told in a sentence what the user should know and need not act on.
        tell: Told how the sweep ended, before it is left: a signal can still come meanwhile.

    Raises:
        SweepHeld: Another driver holds it.
        SweepExists: `new`, and the name is taken.
        LockLost: The lock was taken away from under this driver.
        LedgerError: The ledger cannot be used; `LedgerBusy` when another process holds it.
        OriginChanged: Trials before and after could not be compared.
        StrangerInTheWay: A new trial would find files that are not its own.
    """
    place = ledger_location(paths, spec)
    lock = SweepLock(paths.lock, place.lock())
    token = lock.acquire().token
    try:
        remove_scratch(paths)  # of an earlier driver, with what it was asked
        wishes = StopRequests(paths, token)
        with make_signal_handler(paths, lock, token, wishes, grace=grace) as interruption:
            if new and paths.exists():
                raise SweepExists(paths)
            clean_up_dead_drivers(*([lock.previous.token] if lock.previous else []))
            if isinstance(machine, Cluster):
                tag_child_processes(token)
            else:
                local_ray.configure(token)
            before = spec if new else read_spec(paths.spec).spec
            sweep = open_sweep(
                paths,
                spec,
                origin or Origin(),
                new=new,
                accept_changes=accept_changes,
                offline=offline,
                place=place,
                fence=lock.check,
            )
            if changed := describe_changes(before, spec):
                warn(f"changed: {changed}")
            abort_reason = None
            node_died = machine.node_died if isinstance(machine, Cluster) else lambda _: False
            try:
                sweep.recorder.artifact(None, paths.spec, paths.spec.name)
                sweep.reconcile(warn)
                if no_effect_warning := sweep.no_effect_warning(before):
                    warn(no_effect_warning)
                finished = sum(trial.finished for trial in sweep.ledger.trials())
                with (
                    FigureWorkerPool(
                        spec, paths, sweep.ledger.trials(), sweep.recorder
                    ) as gallery,
                    ReportWorker(sweep.num_trials - finished, plan.concurrency) as press,
                ):
                    if sweep.tracking.needs_figures:
                        gallery.show_again(trial.number for trial in sweep.ledger.trials())
                        sweep.tracking.figures_sent()

                    def note_end(trial: TrialRecord) -> None:
                        gallery.add(trial)
                        press.trial_ended()

                    if sweep.num_remaining and not interruption.requested:
                        say("starting Ray")
                        make_directory(paths.trial(0).parent)  # trials' workers make their own
                        if isinstance(machine, Cluster):
                            ray_runs = machine.watched(
                                plan.concurrency,
                                lost=partial(exit_on_cluster_loss, paths, lock, token),
                            )
                        else:
                            ray_runs = local_ray.running(
                                token,
                                machine,
                                concurrency=plan.concurrency,
                                interruption=interruption,
                                hidden_env=credentials(spec.tracking.uri, spec.storage.ledger),
                            )
                        with ray_runs:
                            if not interruption.requested:
                                front = sweep.ledger.front()
                                best = (front[0].number, front[0].values[0]) if front else None
                                with make_view(finished, sweep.num_trials, best) as view:
                                    abort_reason = tune_trials(
                                        sweep,
                                        plan,
                                        view,
                                        interruption,
                                        wishes,
                                        lock,
                                        on_end=note_end,
                                        node_died=node_died,
                                    )
                        lock.check()  # the stores are otherwise another driver's workers'
                        sweep.close_stores()
                    lock.check()
                    say("delivering to the tracking store")
                    tell(finalize_attempt(sweep, gallery, interruption, abort_reason, press.write))
            finally:
                sweep.tracking.close(timeout=0.0)
    finally:
        if lock.is_ours():  # what lies there is otherwise another driver's
            remove_scratch(paths)
        lock.release()
