"""Running a sweep: `run`, `resume` and `extend` are the same operation.

Take the lock; clean up after a dead driver; open the ledger; start a fresh Tuner whose searcher
first hands out the unfinished trials and then asks for new ones; tell the scheduler the
past; record; publish the best. Ray's own directory is thrown away at the end.
"""

from __future__ import annotations

import math
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from ray import tune
from ray.tune import TuneError
from ray.tune.schedulers import TrialScheduler

from sweeps import control, engine
from sweeps.callbacks import Bookkeeper, View
from sweeps.corrections import apply
from sweeps.departure import EXPORT, listen, remove_scratch
from sweeps.exits import NO_SUCCESS
from sweeps.facts import gather
from sweeps.failures import Hopeless
from sweeps.interrupt import Interruption
from sweeps.layout import LedgerError, SweepExists, SweepPaths, artifact_root, tracking_uri
from sweeps.ledger import Ledger, TrialRecord
from sweeps.ledger_file import num_trials
from sweeps.lock import SweepLock
from sweeps.origin import Origin, check_origin
from sweeps.orphans import clean_up_after_the_dead
from sweeps.parameters import flatten
from sweeps.pictures import Gallery
from sweeps.reconcile import reconcile
from sweeps.resources import Machine, Plan
from sweeps.results import NoBest, NoReport, Outcome, draw_report, export_trial, no_success
from sweeps.revisions import read_spec, write_spec
from sweeps.schedulers import make_scheduler, replay, stopped_trials
from sweeps.search import LedgerSearcher, make_sampler
from sweeps.spec import SweepSpec
from sweeps.tags import NOT_STOPPED, STOPPED_BY_INTERRUPT, best_tags, curve_tags, health_tags
from tracking.mlflow_recorder import MlflowRecorder
from tracking.outbox_file import OutboxError
from tracking.provenance import provenance
from tracking.recorder import Recorder
from trainable.ray_adapter import TuneTrial

ViewFactory = Callable[[int], AbstractContextManager[View]]
"""Makes the view, given how many trials were finished before."""

_DELIVERY_SECONDS = 60.0
_DELIVERY_SECONDS_AFTER_A_SIGNAL = 5.0
_SILENCE_SECONDS = 10.0

_SECONDS_FOR_PICTURES = 10.0
"""What the end of a sweep waits for pictures of trials, beside the best one's weights."""


def run_sweep(
    paths: SweepPaths,
    spec: SweepSpec,
    plan: Plan,
    machine: Machine,
    make_view: ViewFactory,
    *,
    new: bool,
    origin: Origin | None = None,
    accept_changes: bool = False,
    grace: float = 30.0,
    offline: bool = False,
    say: Callable[[str], None] = lambda _: None,
    warn: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Run a sweep to its end, or until it is interrupted.

    Args:
        paths: Where the sweep lives.
        spec: What to run; for a resumed sweep, with what was changed.
        plan: Resources per trial and how many at once.
        machine: What Ray may use.
        new: Whether the sweep must not exist yet; otherwise it must.
        origin: What its trials are run from; None leaves that unknown.
        accept_changes: Go on although code, data or what values mean has changed.
        grace: Seconds from the first signal until this process has ended; trials have most of
            them to save their state.
        offline: Ask no tracking server: everything stays in the outbox.
        say: Told in a few words what is happening when it takes long.
        warn: Told in a sentence what the user should know and need not act on.

    Raises:
        SweepHeld: Another driver holds it.
        SweepExists: `new`, and the name is taken.
        LockLost: The lock was taken away from under this driver.
        LedgerError: The ledger cannot be used; `LedgerBusy` when another process holds it.
        OriginChanged: Trials before and after could not be compared.
        StrangerInTheWay: A new trial would find files that are not its own.
    """
    lock = SweepLock(paths.lock)
    token = lock.acquire().token
    try:
        remove_scratch(paths)  # of an earlier driver, with what it was asked
        wishes = control.Wishes(paths, token)
        with listen(paths, lock, token, wishes, grace=grace) as interruption:
            if new and paths.exists():
                raise SweepExists(paths.name)
            clean_up_after_the_dead(*([lock.previous.token] if lock.previous else []))
            engine.configure(token)
            ledger = _open_ledger(
                paths, spec, origin or Origin(), new=new, accepted=accept_changes
            )
            recorder = _open_recorder(
                paths, spec, ledger, {} if new else NOT_STOPPED, offline=offline
            )
            hopeless = None
            try:
                recorder.artifact(None, paths.spec, paths.spec.name)
                _reconcile(paths, spec, ledger, recorder, warn)
                with Gallery(spec, paths, ledger, recorder) as gallery:
                    finished = sum(trial.finished for trial in ledger.trials())
                    if finished < spec.trials and not interruption.requested:
                        say("starting Ray")
                        with engine.running(
                            token,
                            machine,
                            concurrency=plan.concurrency,
                            interruption=interruption,
                        ):
                            if not interruption.requested:
                                with make_view(finished) as view:
                                    hopeless = _tune(
                                        paths,
                                        spec,
                                        plan,
                                        ledger,
                                        recorder,
                                        gallery,
                                        view,
                                        interruption,
                                        wishes,
                                        lock,
                                    )
                    lock.check()
                    say("delivering to the tracking store")
                    return _conclude(
                        paths, spec, ledger, recorder, gallery, interruption, hopeless
                    )
            finally:
                recorder.close(timeout=0.0)
    finally:
        if lock.is_ours():  # what lies there is otherwise another driver's
            remove_scratch(paths)
        lock.release()


def _open_ledger(
    paths: SweepPaths, spec: SweepSpec, origin: Origin, *, new: bool, accepted: bool
) -> Ledger:
    """The spec's file is the commit point: a sweep exists once it is there, and its ledger was
    made before.
    """
    if new:
        _remove_unborn(paths)
        ledger = Ledger.create(paths.ledger, mode=spec.mode, sweep_id=uuid.uuid4().hex)
    else:
        ledger = Ledger.open(paths.ledger)
        # Where nothing has been trained yet, there is nothing to compare with.
        accepted = accepted or not any(trial.reports for trial in ledger.trials())
        before = read_spec(paths.spec).spec
        check_origin(ledger.origin, origin, before, spec, accepted=accepted)
    ledger.note_origin(origin)
    write_spec(paths.spec, spec)
    return ledger


def _remove_unborn(paths: SweepPaths) -> None:
    """Remove what a driver left that died before the sweep existed; never a ledger of trials."""
    if paths.ledger.exists() and num_trials(paths.ledger):
        raise LedgerError(
            f"{paths.spec} is gone, but {paths.ledger} holds trials; a sweep of that name is not "
            "begun anew; restore the spec from a backup, or choose another name with --name"
        )
    paths.ledger.unlink(missing_ok=True)


def _open_recorder(
    paths: SweepPaths, spec: SweepSpec, ledger: Ledger, tags: Mapping[str, str], *, offline: bool
) -> MlflowRecorder:
    return MlflowRecorder(
        uri=spec.tracking.uri or tracking_uri(paths.root),
        artifact_root=None if spec.tracking.uri else artifact_root(paths.root),
        experiment=spec.name,
        sweep_id=ledger.sweep_id,
        outbox=paths.outbox,
        tags={
            **provenance(),
            **ledger.origin.tags(),
            **curve_tags(spec.tracking.every),
            **tags,
        },
        params=dict(flatten(spec.model_dump(mode="json"))),
        offline=offline,
    )


def _reconcile(
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: Ledger,
    recorder: Recorder,
    warn: Callable[[str], None],
) -> None:
    """Put right what an earlier driver left half done; a new sweep is a case like any other."""

    def judge(reports: Mapping[int, Mapping[int, float]], unfinished: Set[int]) -> frozenset[int]:
        return stopped_trials(_scheduler(spec), reports, unfinished)

    facts = gather(paths, spec, ledger.trials(), live=False, judge=judge)
    apply(
        reconcile(facts),
        paths,
        spec,
        ledger,
        recorder,
        sampler=lambda number: make_sampler(spec.search, seed=spec.seed, number=number),
        warn=warn,
    )


def _scheduler(spec: SweepSpec) -> TrialScheduler:
    return make_scheduler(spec.early_stopping, epochs=spec.budget.epochs, mode=spec.mode)


def _tune(
    paths: SweepPaths,
    spec: SweepSpec,
    plan: Plan,
    ledger: Ledger,
    recorder: Recorder,
    gallery: Gallery,
    view: View,
    interruption: Interruption,
    wishes: control.Wishes,
    lock: SweepLock,
) -> Hopeless | None:
    """Run trials until there are no more, or until the sweep is to stop; say why it stopped when
    that was its own decision.
    """
    scheduler = _scheduler(spec)
    for trial in ledger.trials():
        if trial.finished:
            replay(scheduler, f"past-{trial.number}", trial.reports, finished=True)
    searcher = LedgerSearcher(
        ledger,
        spec,
        paths,
        scheduler,
        concurrency=plan.concurrency,
        threads=max(1, int(plan.cpu)),
    )

    ended: set[int] = set()  # as the user asked

    def look_around() -> None:
        lock.check()
        if bookkeeper.hopeless and not searcher.draining:
            control.order(paths)
        searcher.draining = interruption.requested or bookkeeper.hopeless is not None
        for number in wishes.trials - ended:
            ended.add(number)
            if searcher.is_live(number):
                control.order(paths, [number])
            else:
                bookkeeper.end_waiting(number)
        if interruption.trials_left <= 0:
            raise _GraceExpired

    bookkeeper = Bookkeeper(
        spec, paths, ledger, recorder, view, on_step=look_around, on_end=gallery.add
    )
    tuner = tune.Tuner(
        tune.with_resources(TuneTrial, {"cpu": plan.cpu, "gpu": plan.gpu}),
        tune_config=tune.TuneConfig(
            num_samples=-1, search_alg=searcher, scheduler=scheduler, reuse_actors=True
        ),
        run_config=tune.RunConfig(
            storage_path=str(paths.ray),
            name=f"attempt-{_next_attempt(paths.ray):03d}",
            callbacks=[bookkeeper],
            # Tune tries again without end; the bookkeeper knows when a trial comes no further.
            failure_config=tune.FailureConfig(max_failures=-1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            verbose=0,
        ),
    )
    try:
        tuner.fit()
    except _GraceExpired:
        bookkeeper.interrupt_live()  # they continue from their last checkpoint
    except TuneError as error:
        # Tune turns what a callback raises into text, and keeps the error itself as the context.
        if isinstance(error.__context__, LedgerError | OutboxError):
            raise error.__context__ from None
        raise

    return bookkeeper.hopeless


def _conclude(
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: Ledger,
    recorder: MlflowRecorder,
    gallery: Gallery,
    interruption: Interruption,
    hopeless: Hopeless | None,
) -> Outcome:
    trials, best = ledger.trials(), ledger.best()
    recorder.tag(None, health_tags(trials))
    left = spec.trials - sum(trial.finished for trial in trials)
    failed: int | None = None
    cause: str | None = None
    if hopeless:
        failed, cause = hopeless.numbers[-1], hopeless.cause
    elif best is None:
        failed, cause = no_success(trials)
    if interruption.requested:
        recorder.finish(None, "KILLED", STOPPED_BY_INTERRUPT)
    elif cause is not None:
        gallery.finish(_SECONDS_FOR_PICTURES)
        _publish_report(paths, recorder)
        recorder.finish(None, "FAILED", {"reason": cause})
    else:
        assert best is not None
        _publish_best(paths, spec, ledger, best, recorder, gallery)
        recorder.finish(None, "FINISHED", {})
    pending = _deliver(recorder, interruption)
    code = interruption.exit_code or (NO_SUCCESS if cause else 0)
    if not interruption.requested and not left:
        ledger.conclude()
    return Outcome(code, best, len(trials), pending, left, cause, failed)


def _deliver(recorder: MlflowRecorder, interruption: Interruption) -> int:
    """Wait until the tracking server has everything, but not for ever, and after an interruption
    only as long as there is time; what is left is delivered by the next resume.
    """
    started = time.monotonic()
    deadline = started + _DELIVERY_SECONDS
    while (left := deadline - time.monotonic()) > 0 and recorder.flush(min(left, 0.2)):
        now = time.monotonic()
        if interruption.requested:
            soon = min(_DELIVERY_SECONDS_AFTER_A_SIGNAL, interruption.left - 1.0)
            deadline = min(deadline, now + soon)
        waited = now - started if recorder.silence < math.inf else math.inf  # asking nobody
        if min(recorder.silence, waited) > _SILENCE_SECONDS:
            deadline = now  # nobody should wait for a server that is not there
    left = deadline - time.monotonic()
    return recorder.close(timeout=max(left, 0.0))


def _publish_best(
    paths: SweepPaths,
    spec: SweepSpec,
    ledger: Ledger,
    best: TrialRecord,
    recorder: Recorder,
    gallery: Gallery,
) -> None:
    """Put the best trial's weights, configuration, card and pictures on the sweep's own run."""
    recorder.tag(None, best_tags(best))
    origin = {**provenance(), **ledger.origin.tags()}
    with (
        tempfile.TemporaryDirectory(dir=paths.directory, prefix=EXPORT) as directory,
        ThreadPoolExecutor() as beside,  # a child process that imports for seconds
    ):
        weights = beside.submit(export_trial, paths, spec, best, Path(directory, "best"), origin)
        report = beside.submit(_publish_report, paths, recorder)
        gallery.finish(_SECONDS_FOR_PICTURES, first=best.number)
        for picture in gallery.pictures(best.number):
            recorder.artifact(None, picture, f"figures/{picture.name}")
        try:
            for file in weights.result():
                recorder.artifact(None, file, f"best/{file.name}")
        except NoBest as missing:
            recorder.tag(None, {"best_checkpoint": f"missing: {missing}"})
        report.result()


def _publish_report(paths: SweepPaths, recorder: Recorder) -> None:
    """Put the sweep's report on its own run."""
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=EXPORT) as directory:
        try:
            file = draw_report(paths, Path(directory, "report.html"))
        except NoReport as missing:
            recorder.tag(None, {"report": f"missing: {missing}"})
        else:
            recorder.artifact(None, file, "report.html")


def _next_attempt(ray_directory: Path) -> int:
    return 1 + len(list(ray_directory.glob("attempt-*")))


class _GraceExpired(BaseException):
    """The trials' time to checkpoint is over.

    No `Exception`: on one of those Tune would wait for its actors before it lets go.
    """
