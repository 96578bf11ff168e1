"""The searcher through which Ray Tune gets the trials of the ledger.

It first returns the trials that an earlier driver left unfinished, with their numbers and
parameters, and then paused trials that can be promoted, or else new ones. `save` and `restore` are
empty because the ledger has everything. What must not live here: events of a trial
(`run.tune_callbacks`), stopping rules (`stopping`), and a new trial's parameters (`suggest`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from optuna.trial import TrialState
from ray.tune.search import Searcher

from sweeps.errors import SpecError
from sweeps.ledger.attributes import EXEMPT, PROMOTED, compared_values, is_of_search
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.over_seeds import next_seed, origins
from sweeps.ledger.trials import TrialRecord, of_search
from sweeps.paths import PROGRAM, SweepPaths
from sweeps.search.pbt_exploit import PbtExploit
from sweeps.search.shown_trials import origins_in
from sweeps.search.suggest import Suggester
from sweeps.spec.searched_workers import does_not_fit
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import rank_timeout, with_accumulation
from sweeps.stopping.rule import Reports, Standing, judged_reports, make_pausing_rule
from sweeps.stopping.schedulers import (
    StopperScheduler,
    WouldStop,
    is_exempt,
    make_scheduler,
    never_promoted,
)
from sweeps.stopping.seed_means import over_seeds
from sweeps.stores import address_of
from trainable.adapters.ray import OBJECTIVE
from trainable.config import TrialConfig

_REPORT_BUFFER_SECONDS = 0.2
"""A worker batches reports that follow each other faster, because each one passes through Ray."""
_OF_SEARCH = ("search", "repeat")
"""The roles of trials that wait while `LedgerSearcher.paused` is set."""


@dataclass(frozen=True, kw_only=True)
class DriverCallbacks:
    """What the searcher calls of the driver that runs the sweep."""

    fence: Callable[[], None]
    """Raises if another driver has acquired the sweep's lock."""
    refuse: Callable[[int, SpecError], None]
    """Ends a trial whose parameters do not fit together."""
    warn: Callable[[int, str], None] = lambda *_: None
    flush: Callable[[], None] = lambda: None
    """Writes queued reports to the ledger, before a decision that depends on them."""
    add_extra: Callable[[], list[TrialRecord]] = list
    """Adds trials that are not of the search, and returns them."""


class Capacity(NamedTuple):
    """What runs at once."""

    trials: int
    threads: int
    """Of each process of a trial."""
    max_workers: int | None = None
    """The most workers (ranks) of all trials together; None: as many as the trials have."""


class LedgerSearcher(Searcher):
    """Return the trials of the ledger to Ray Tune."""

    def __init__(
        self,
        ledger: Ledger,
        spec: SweepSpec,
        paths: SweepPaths,
        driver: DriverCallbacks,
        capacity: Capacity,
    ) -> None:
        super().__init__(metric=OBJECTIVE, mode=spec.modes[0])
        self._ledger = ledger
        self._spec = spec
        self._paths = paths
        self._suggester = Suggester(spec, ledger)
        self._driver = driver
        self._capacity = capacity
        self._pauses = make_pausing_rule(spec)
        self._exploit = (
            PbtExploit(spec, paths, ledger, driver.fence, driver.warn)
            if spec.early_stopping.rule.is_population
            else None
        )
        if self._exploit is not None:
            self._exploit.link()  # an edited spec may no longer have the rung at which they wait
        trials = ledger.trials()
        unfinished = [trial for trial in trials if not trial.finished]
        self._extra = [t for t in unfinished if t.role not in _OF_SEARCH]
        self._unfinished = [
            trial
            for trial in unfinished
            if trial.role == "repeat" or (trial.role == "search" and not self._is_paused(trial))
        ]
        searched = of_search(trials)
        self._next_number, self._num_suggested = len(trials), len(searched)
        self._next_place = 1 + max((trial.place for trial in searched), default=-1)
        self._num_trials = spec.num_trials
        self._live: dict[str, int] = {}
        self._live_workers: dict[str, int] = {}
        self._may_promote = self._pauses is not None
        self._may_repeat = spec.repeats.seeds > 1
        self.stopping = False
        """Set to end the sweep after the running trials: no further trial is returned."""
        self.paused = False
        """Set to return no trial of the search for now; extra trials still start."""

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
    ) -> bool:
        """Accept Tune's call; the constructor received everything."""
        del metric, mode, config, spec
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the configuration of the next trial; None: not yet; FINISHED: there is none."""
        if len(self._live) >= self._capacity.trials:
            return None
        while not self.stopping:
            trial = self._next_trial()
            if trial is None:
                break
            if not self._fits(trial):
                (self._unfinished if trial.role in _OF_SEARCH else self._extra).insert(0, trial)
                return None
            try:
                config = self._config(trial)
            except SpecError as error:
                self._driver.refuse(trial.number, error)
                self._may_promote = self._pauses is not None  # no trial waits for it any more
                continue
            self._live[trial_id] = trial.number
            self._live_workers[trial_id] = config.workers
            resolved = with_accumulation(config, trial.accumulation)
            return {
                "number": trial.number,
                "place": trial.place,
                "workers": config.workers,
                "params": trial.params,
                "config": resolved.model_dump(mode="json"),
                "role": trial.role,
                "exempt": trial.exempt,
                "origin": trial.origin,
                "seed": trial.seed,
                "pause_at_epoch": self._pauses.pause_at_epoch(max(trial.reports, default=0))
                if self._pauses and trial.role == "search" and not trial.exempt
                else None,
                "directory": str(self._paths.trial(trial.number)),
                "checkpoints": address_of(self._paths, self._spec, trial.number),
                "drain": str(self._paths.drain),
                "stop": str(self._paths.stop(trial.number)),
                "leaves": self._paths.leaves,
                "heartbeat": str(self._paths.heartbeat(trial.number)),
                "halve_batch": self._spec.failures.out_of_memory == "halve_batch",
                "threads": self._capacity.threads,
                "reuse": self._spec.resources.reuse_workers and config.workers == 1,
                "rank_timeout": rank_timeout(self._spec.failures.step_timeout),
                "report_buffer_seconds": 0.0
                if self._spec.early_stopping.rule.decides_per_report
                else _REPORT_BUFFER_SECONDS,
            }
        if self._live and not self.stopping:
            return None  # their results may promote a paused trial
        return Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """Free the slot of a trial; the event handler of the driver records its end."""
        del result, error
        self._live.pop(trial_id, None)
        self._live_workers.pop(trial_id, None)
        self._may_promote = self._pauses is not None
        self._may_repeat = self._spec.repeats.seeds > 1

    def _fits(self, trial: TrialRecord) -> bool:
        """Return whether the group of a trial fits beside those of the running trials."""
        if self._capacity.max_workers is None or not self._live:
            return True
        used = sum(self._live_workers.values())
        return used + self._spec.workers_of(trial.params) <= self._capacity.max_workers

    def _config(self, trial: TrialRecord) -> TrialConfig:
        """Return the configuration of a trial."""
        config = self._spec.trial_config(trial.seed, trial.params)
        if self._capacity.max_workers is not None and config.workers > self._capacity.max_workers:
            again = self._paths.command("resume", str(trial.number), "--retry", program=PROGRAM)
            remedy = f"run it again where they do, with: {again}"
            raise SpecError(
                [does_not_fit(trial.number, config.workers, self._capacity.max_workers, remedy)]
            )
        return config

    def is_live(self, number: int) -> bool:
        """Return whether Tune runs the trial."""
        return number in self._live.values()

    def never_promoted(self) -> dict[int, str]:
        """Return the paused trials that can no longer be promoted, and why; called at the end."""
        if self._pauses is None or self.stopping or self.paused:
            return {}
        return never_promoted(self._spec, self._standing())

    def __getstate__(self) -> dict[str, Any]:
        """Return no state: the ledger cannot be pickled, and Ray's file is never read."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Create an empty file for Tune; the ledger has the state."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, because nothing was saved."""

    def _next_trial(self) -> TrialRecord | None:
        if not self._extra:
            self._extra = self._driver.add_extra()
            self._next_number += len(self._extra)
        if (extra := self._next_open(self._extra)) is not None:
            return extra  # the user asked for it, so that no stop criterion holds it back
        if self.paused:
            return None
        if (unfinished := self._next_open(self._unfinished)) is not None:
            return unfinished
        if (repeated := self._repeated()) is not None:
            return repeated
        if (promoted := self._promoted()) is not None:
            return promoted
        if self._num_suggested >= self._num_trials:
            return None
        if self._suggester.reads_results:
            self._driver.flush()
        number, place = self._next_number, self._next_place
        self._next_number += 1
        self._next_place += 1
        self._num_suggested += 1
        suggestion = self._suggester.propose(number)  # may take seconds
        self._driver.fence()
        return self._ledger.add(
            suggestion,
            exempt=self._is_exempt(place),
            place=None if place == number else place,
        )

    def _is_exempt(self, place: int) -> bool:
        return is_exempt(self._spec.early_stopping.exempt, self._spec.seed, place)

    def _next_open(self, trials: list[TrialRecord]) -> TrialRecord | None:
        """Remove and return the first trial that is still open: the user may have stopped one."""
        while trials:
            trial = trials.pop(0)
            if not self._ledger.trial(trial.number).finished:
                return trial
        return None

    def _is_paused(self, trial: TrialRecord) -> bool:
        if self._pauses is None or trial.exempt:
            return False
        last = max(trial.reports, default=0)
        return self._pauses.pauses_at(trial.reports) and trial.promoted_at != last

    def _repeated(self) -> TrialRecord | None:
        """Add and return a further seed of a configuration whose first seed is complete."""
        if not self._may_repeat:
            return None
        self._driver.flush()
        found = next_seed(self._ledger.trials(), self._spec.repeats.seeds)
        self._may_repeat = found is not None  # until another trial has ended
        if found is None:
            return None
        self._next_number += 1
        self._driver.fence()
        return self._ledger.add_extra("repeat", *found)

    def _promoted(self) -> TrialRecord | None:
        if self._pauses is None or not self._may_promote:
            return None
        self._driver.flush()
        now = self._standing()
        number = self._pauses.next_promotion(
            now._replace(
                reports=judged_reports(now.reports, self._spec),
                live=now.live | set(self._live.values()),
            )
        )
        self._may_promote = number is not None  # until another trial reaches a rung
        if number is None:
            return None
        if self._exploit is not None:  # the ledger has a decision for all members instead
            self._exploit(max(self._ledger.trial(number).reports))
            return self._ledger.trial(number)
        self._driver.fence()
        return self._ledger.promote(number)

    def _standing(self) -> Standing:
        """Return the trials of the search as the ledger has them; live are those it promoted."""
        # Records are not used here: building thousands of them would take long.
        every = self._ledger.frozen_trials()
        trials = [one for one in every if is_of_search(one.user_attrs)]
        origins = origins_in(every)
        reports: Reports = {
            trial.number: compared_values(trial.user_attrs, trial.intermediate_values)
            for trial in (*trials, *(every[number] for number in origins))
        }
        unfinished = [trial for trial in trials if not trial.state.is_finished()]
        promoted = {
            trial.number
            for trial in unfinished
            if trial.user_attrs.get(PROMOTED) == max(reports[trial.number], default=0)
        }
        return Standing(
            over_seeds(reports, origins, self._spec.repeats.combine) if origins else reports,
            {trial.number for trial in unfinished},
            promoted,
            {trial.number for trial in trials if EXEMPT in trial.user_attrs},
            {trial.number for trial in trials if trial.state == TrialState.COMPLETE},
        )


def replayed_scheduler(
    spec: SweepSpec, trials: Sequence[TrialRecord], saved_epoch: Callable[[int], int]
) -> StopperScheduler:
    """Return a new scheduler that has seen all reports of the search.

    A last report without its checkpoint is left out: the trial will report that epoch again.
    """
    scheduler = make_scheduler(spec)
    if not scheduler.compares:
        return scheduler
    scheduler.join(origins(trials))
    for trial in trials:
        if trial.role not in ("search", "repeat"):
            continue
        past = trial.compared_reports
        # Where an exempt trial would have been stopped is in the ledger with its report.
        if trial.reports and not trial.finished and not trial.exempt:
            last = max(trial.reports)
            if last > saved_epoch(trial.number):
                past.pop(last, None)
        at, why = trial.would_stop_at, trial.would_stop_reason
        scheduler.replay(
            trial.number,
            past,
            would_stop=None if at is None else WouldStop(at, why or ""),
            repeats=trial.origin,
            place=trial.place,
        )
    return scheduler
