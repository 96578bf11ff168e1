"""One session of Ray Tune: hand out the ledger's trials until there are none left.

What must not live here: Ray's own start and end (`engine`), what is written down (`callbacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ray import tune
from ray.tune import TuneError
from ray.tune.execution.class_cache import ENV_VARS_TO_PROPAGATE

from redaction.secrets import is_secret
from sweeps.driver import stop_requests
from sweeps.driver.session import SweepSession
from sweeps.driver.stop_requests import StopRequests
from sweeps.driver.tune_callbacks import TrialMemoryReleaser, TuneEventHandler
from sweeps.early_stopping.schedulers import replay
from sweeps.engine import local_ray
from sweeps.engine.resources import ResourcePlan
from sweeps.engine.signals import Interruption
from sweeps.engine.trial_process import SweepTrial
from sweeps.ledger.ledger import TrialRecord
from sweeps.paths import LedgerError
from sweeps.policies.failure_policy import RepeatedFailure
from sweeps.policies.stop_criteria import BY_THE_SWEEP, StopMonitor
from sweeps.recording.tags import BY_THE_USER
from sweeps.results.observer import ProgressObserver
from sweeps.search.searcher import LedgerSearcher
from sweeps.sweep_lock import SweepLock
from trainable.errors import StorageError
from trainable.metrics_file import CurveDamaged


def tune_trials(
    sweep: SweepSession,
    plan: ResourcePlan,
    view: ProgressObserver,
    interruption: Interruption,
    wishes: StopRequests,
    lock: SweepLock,
    *,
    on_end: Callable[[TrialRecord], None],
    node_died: Callable[[Exception | None], bool] = lambda _: False,
) -> RepeatedFailure | None:
    """Run trials until there are no more, or until the sweep is to stop.

    Args:
        plan: Resources per trial and how many at once.
        view: Where the trials are shown.
        interruption: Whether the driver is to leave, and how much time trials have.
        wishes: What was asked for from elsewhere.
        lock: Looked at in every turn and before every write: who lost it writes nothing any more.
        on_end: Told of each trial that has come to its end, in another thread.
        node_died: Whether an actor was lost with the whole node that it ran on.

    Returns:
        Why it stopped, when that was the sweep's own decision.
    """
    paths, spec, ledger = sweep.paths, sweep.spec, sweep.ledger
    scheduler = sweep.scheduler()
    for trial in ledger.trials():
        if trial.finished:
            number = trial.number
            replay(scheduler, f"past-{number}", trial.reports, number=number, finished=True)
    searcher = LedgerSearcher(
        ledger,
        spec,
        paths,
        scheduler,
        fence=lock.check,
        refuse=lambda number, error: bookkeeper.refuse(number, error),
        settle=lambda: bookkeeper.flush(),
        concurrency=plan.concurrency,
        threads=max(1, int(plan.cpu)),
        warn=view.warned,
    )

    stops = StopMonitor(
        spec,
        ledger,
        ends=lambda: bookkeeper.num_finished,
        settle=lambda: bookkeeper.flush(),
        fence=lock.check,
    )
    asked: set[int] = set()

    def look_around() -> None:
        lock.check()
        if bookkeeper.abort_reason and not searcher.stopping:
            stop_requests.request_stop(paths)
        searcher.stopping = interruption.requested or bookkeeper.abort_reason is not None
        end(wishes.trials, BY_THE_USER)
        over = stops.look()
        searcher.paused = over is not None
        if over is not None:
            bookkeeper.flush()
            open_trials = [trial.number for trial in ledger.trials() if not trial.finished]
            end(open_trials, BY_THE_SWEEP + over.why)
        if interruption.trial_grace_remaining <= 0:
            raise _GraceExpired

    def end(numbers: Iterable[int], reason: str) -> None:
        for number in sorted(set(numbers) - asked):
            asked.add(number)
            bookkeeper.stop(number, reason, live=searcher.is_live(number))

    bookkeeper = TuneEventHandler(
        spec,
        paths,
        ledger,
        sweep.recorder,
        view,
        fence=lock.check,
        on_step=look_around,
        on_end=on_end,
        node_died=node_died,
        grace=interruption.grace,
    )
    # Tune hands these to its workers in what Ray logs and in command lines; they inherit them.
    ENV_VARS_TO_PROPAGATE.difference_update(
        [one for one in ENV_VARS_TO_PROPAGATE if is_secret(one)]
    )
    tuner = tune.Tuner(
        tune.with_resources(SweepTrial, {"cpu": plan.cpu, "gpu": plan.gpu}),
        tune_config=tune.TuneConfig(
            num_samples=-1, search_alg=searcher, scheduler=scheduler, reuse_actors=True
        ),
        run_config=tune.RunConfig(
            storage_path=str(paths.ray),
            name=f"attempt-{_next_attempt(paths.ray):03d}",
            callbacks=[bookkeeper, TrialMemoryReleaser()],
            # Tune tries again without end; the bookkeeper knows when a trial comes no further.
            failure_config=tune.FailureConfig(max_failures=-1),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
            verbose=0,
        ),
    )
    try:
        with local_ray.patch_tune():
            tuner.fit()
        lock.check()
        bookkeeper.flush()
        for number in sorted(searcher.never_promoted()):
            bookkeeper.stop(number, None, live=False)
        bookkeeper.interrupt_live()  # who is paused continues when the sweep does
        stops.keep()
    except _GraceExpired:
        bookkeeper.interrupt_live()  # they continue from their last checkpoint
    except TuneError as error:
        # Tune turns what a callback raises into text, and keeps the error itself as the context.
        if isinstance(error.__context__, CurveDamaged | LedgerError | StorageError | OSError):
            raise error.__context__ from None
        raise
    finally:
        bookkeeper.close()

    return bookkeeper.abort_reason


def _next_attempt(ray_directory: Path) -> int:
    return 1 + len(list(ray_directory.glob("attempt-*")))


class _GraceExpired(BaseException):
    """The trials' time to checkpoint is over.

    No `Exception`: on one of those Tune would wait for its actors before it lets go.
    """
