"""Run the ledger's trials with Ray Tune until none remain or the sweep stops.

What must not live here: starting and ending Ray (`engine`), and what happens when a trial reports
or ends (`tune_callbacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import TuneError

from redaction.secrets import is_secret
from sweeps.engine.ray_compat.tune_internals import patch_tune, withhold_env
from sweeps.engine.resources import ResourcePlan
from sweeps.engine.signals import Interruption
from sweeps.engine.trial_process import SweepTrial, group_of
from sweeps.errors import LedgerError
from sweeps.ledger.reasons import BY_THE_SWEEP, BY_THE_USER
from sweeps.reconcile.extra_training import SeriesAdder
from sweeps.reconcile.failure_policy import RepeatedFailure
from sweeps.reconcile.stop_criteria import StopMonitor
from sweeps.run import stop_requests
from sweeps.run.session import SweepSession
from sweeps.run.stop_requests import StopRequests
from sweeps.run.tune_callbacks import TrialMemoryReleaser, TuneEventHandler
from sweeps.run.worker_watch import NoWorkerStarts, WorkerRules
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher, replayed_scheduler
from sweeps.spec.trial_run import num_threads
from sweeps.stores import trial_store
from sweeps.view.observer import ProgressObserver
from trainable.errors import StorageError
from trainable.store.metrics_file import CurveDamaged


class TrialLoop:
    """The scheduler, searcher, event handler and stop monitor of one session of Ray Tune."""

    def __init__(
        self,
        sweep: SweepSession,
        plan: ResourcePlan,
        observer: ProgressObserver,
        interruption: Interruption,
        requests: StopRequests,
        workers: WorkerRules,
    ) -> None:
        self._paths, self._ledger, self._plan = sweep.paths, sweep.ledger, plan
        self._interruption, self._requests, self._fence = interruption, requests, sweep.fence
        sweep.ledger.trial_resources = lambda params: plan.devices_of(
            sweep.spec.workers_of(params)
        )
        self._observer, self._leaving = observer, workers.leaving
        self._stopped: set[int] = set()
        self._scheduler = replayed_scheduler(
            sweep.spec,
            sweep.ledger.trials(),
            lambda number: trial_store(sweep.paths, sweep.spec, number).saved_epoch(),
        )
        self._events = TuneEventHandler(
            sweep, observer, self._scheduler, workers, on_step=self._before_each_step
        )
        self._searcher = LedgerSearcher(
            sweep.ledger,
            sweep.spec,
            sweep.paths,
            DriverCallbacks(
                fence=sweep.fence,
                refuse=self._events.refuse,
                flush=self._events.flush,
                warn=observer.warned,
                add_extra=SeriesAdder(
                    sweep.ledger,
                    ends=lambda: self._events.num_finished,
                    flush=self._events.flush,
                    fence=sweep.fence,
                ),
            ),
            Capacity(plan.max_concurrency, num_threads(plan.cpu), plan.max_workers),
        )
        self._only_extra = self._searcher.paused = sweep.only_extra
        self._stop_monitor = StopMonitor(
            sweep.spec,
            sweep.ledger,
            ends=lambda: self._events.num_finished,
            flush=self._events.flush,
            fence=sweep.fence,
        )

    def run(self) -> RepeatedFailure | None:
        """Run trials until none remain, or until the sweep stops."""
        try:
            self._run()
        except (_GraceExpired, NoWorkerStarts):
            self._events.interrupt_live()  # these trials resume from their last checkpoint
        except TuneError as error:
            # Tune turns the exception of a callback into text and keeps it as the context.
            if isinstance(error.__context__, CurveDamaged | LedgerError | StorageError | OSError):
                raise error.__context__ from None
            raise
        finally:
            self._events.close()
        return self._events.abort_reason

    def _run(self) -> None:
        """Run trials in Ray Tune until the searcher has no more, then record unfinished trials."""
        with patch_tune(self._leaving):
            self._tuner().fit()
        self._fence()
        self._events.flush()
        for number, reason in self._searcher.never_promoted().items():
            self._events.stop(number, reason, live=False)
        self._events.interrupt_live()  # a paused trial resumes when the sweep does
        if not self._only_extra:  # their time is not the search's
            self._stop_monitor.keep()

    def _tuner(self) -> tune.Tuner:
        withhold_env(is_secret)
        return tune.Tuner(
            tune.with_resources(SweepTrial, self._request()),
            tune_config=tune.TuneConfig(
                num_samples=-1,
                search_alg=self._searcher,
                scheduler=self._scheduler,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(
                storage_path=str(self._paths.ray),
                name=f"attempt-{_next_attempt(self._paths.ray):03d}",
                callbacks=[self._events, TrialMemoryReleaser()],
                # Tune retries without limit; the event handler counts the losses of each trial.
                failure_config=tune.FailureConfig(max_failures=-1),
                checkpoint_config=tune.CheckpointConfig(num_to_keep=1),
                verbose=0,
            ),
        )

    def _request(self) -> Callable[[Mapping[str, Any]], tune.PlacementGroupFactory]:
        """Return a function that returns the resources of a suggested trial."""
        plan = self._plan
        bundle = {"CPU": plan.cpu, **({"GPU": plan.gpu} if plan.gpu else {})}
        return partial(group_of, bundle, plan.placement.upper())

    def _before_each_step(self) -> None:
        """Act on signals, stop requests and stop criteria before Tune's next step."""
        self._fence()
        if self._events.abort_reason and not self._searcher.stopping:
            stop_requests.request_stop(self._paths)
        self._searcher.stopping = (
            self._interruption.requested or self._events.abort_reason is not None
        )
        self._stop_trials(self._requests.trials, BY_THE_USER)
        if not self._only_extra:
            self._look_at_criteria()
        elif self._searcher.stopping:
            self._observer.stopping()
        if self._interruption.trial_grace_remaining <= 0:
            raise _GraceExpired

    def _look_at_criteria(self) -> None:
        criterion = self._stop_monitor.look()
        self._searcher.paused = criterion is not None
        is_stopping = self._searcher.stopping
        if criterion is not None:
            self._events.flush()
            unfinished = [one for one in self._ledger.trials() if not one.finished]
            searched = [one for one in unfinished if one.role in ("search", "repeat")]
            is_stopping = is_stopping or len(searched) == len(unfinished)
            self._stop_trials([one.number for one in searched], BY_THE_SWEEP + criterion.why)
        if is_stopping:  # a trial that finishes a pruned one goes on after a criterion
            self._observer.stopping()

    def _stop_trials(self, numbers: Iterable[int], reason: str) -> None:
        for number in sorted(set(numbers) - self._stopped):
            self._stopped.add(number)
            self._events.stop(number, reason, live=self._searcher.is_live(number))


def _next_attempt(ray_directory: Path) -> int:
    return 1 + len(list(ray_directory.glob("attempt-*")))


class _GraceExpired(BaseException):
    """The time that trials have to save their state is over.

    Not an `Exception`: on an `Exception`, Tune waits for its actors before it returns.
    """
