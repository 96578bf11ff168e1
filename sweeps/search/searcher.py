"""Search: the searcher that stands between the ledger and Ray Tune.

The searcher first hands out the trials that an earlier driver left unfinished, with their numbers
and parameters; then, again and again, a paused trial that can be promoted or else a new one from
the ledger. It keeps nothing of its own: its `save`
and `restore` are empty because the ledger is the record. What must not live here: what happens
to a trial afterwards (callbacks), stopping (schedulers), and which point a trial gets (proposals).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from sweeps.checkpoint_locations import address_of, trial_store
from sweeps.config.search_validators import LEARN_NOTHING
from sweeps.config.spec import SpecError, SweepSpec
from sweeps.early_stopping.pausing_rules import make_pausing_rule
from sweeps.early_stopping.schedulers import replay
from sweeps.ledger.ledger import Ledger, TrialRecord
from sweeps.paths import SweepPaths
from sweeps.population.pbt_exploit import PbtExploit
from sweeps.search.suggest import Suggester
from trainable.ray_adapter import OBJECTIVE

_TOGETHER_SECONDS = 0.2
"""Reports that come faster are told together: each passes through Ray."""


class LedgerSearcher(Searcher):
    """Hands Ray Tune the ledger's trials.

    Args:
        ledger: Where trials come from.
        spec: The sweep; `spec.trials` bounds how many there are.
        paths: Where each trial's directory is.
        scheduler: Is told an unfinished trial's past when Tune gives it a new id.
        fence: Called right before a trial is added; raises when another driver may run the sweep.
        refuse: Told of a trial whose values are no configuration, and why; gives it its end.
        concurrency: How many trials may be live at once.
        threads: CPU threads of each trial.
        warn: Told, by the trial's number, what its user should know.
        settle: Returns once the ledger knows all that trials told by now.
    """

    def __init__(
        self,
        ledger: Ledger,
        spec: SweepSpec,
        paths: SweepPaths,
        scheduler: TrialScheduler,
        *,
        fence: Callable[[], None],
        refuse: Callable[[int, SpecError], None],
        concurrency: int,
        threads: int,
        warn: Callable[[int, str], None] = lambda *_: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(metric=OBJECTIVE, mode=spec.modes[0])
        self._ledger = ledger
        self._spec = spec
        self._paths = paths
        self._scheduler = scheduler
        self._proposer = Suggester(spec, ledger)
        self._fence = fence
        self._refuse = refuse
        self._concurrency = concurrency
        self._threads = threads
        self._pauses = make_pausing_rule(spec)
        self._settle = settle
        self._exploit = (
            PbtExploit(spec, paths, ledger, fence, warn)
            if spec.early_stopping.rule.is_population
            else None
        )
        if self._exploit is not None:
            self._exploit.link()  # an edited spec may have no rung any more where they wait
        trials = ledger.trials()
        self._unfinished = [
            trial
            for trial in trials
            if not trial.finished and not (self._pauses and self._pauses.pauses_at(trial.reports))
        ]
        self._next_number = len(trials)
        self._live: dict[str, int] = {}
        self._may_promote = self._pauses is not None
        self.stopping = False
        """Set to end the sweep after the live trials: no further one is handed out."""
        self.paused = False
        """Set to hand out none for now."""

    def set_search_properties(
        self, metric: str | None, mode: str | None, config: dict[str, Any], **spec: Any
    ) -> bool:
        """Everything is known already; Tune asks nevertheless."""
        del metric, mode, config, spec
        return True

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial's configuration, None to be asked later, or FINISHED."""
        if len(self._live) >= self._concurrency:
            return None
        while not (self.stopping or self.paused):
            trial = self._next_trial()
            if trial is None:
                break
            try:
                config = self._spec.trial_config(trial.number, trial.params)
            except SpecError as error:
                self._refuse(trial.number, error)
                self._may_promote = self._pauses is not None  # nobody waits for it any more
                continue
            self._tell_past(trial, trial_id)
            self._live[trial_id] = trial.number
            resolved = config.model_dump(mode="json")
            noted, train = trial.accumulation or 0, config.train
            if noted > train.accumulation and train.batch_size % noted == 0:  # else it was edited
                resolved["train"]["accumulation"] = noted
            return {
                "number": trial.number,
                "params": trial.params,
                "config": resolved,
                "until": self._pauses
                and self._pauses.pause_at_epoch(max(trial.reports, default=0)),
                "directory": str(self._paths.trial(trial.number)),
                "checkpoints": address_of(self._paths, self._spec, trial.number),
                "drain": str(self._paths.drain),
                "stop": str(self._paths.stop(trial.number)),
                "heartbeat": str(self._paths.heartbeat(trial.number)),
                "halve_batch": self._spec.failures.out_of_memory == "halve_batch",
                "threads": self._threads,
                "together": 0.0
                if self._spec.early_stopping.rule.decides_per_report
                else _TOGETHER_SECONDS,
            }
        if self._live and not self.stopping:
            return None  # what becomes of them may give somebody else a turn
        return Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """A slot is free; what the trial's end means is the bookkeeper's business."""
        del result, error
        self._live.pop(trial_id, None)
        self._may_promote = self._pauses is not None

    def is_live(self, number: int) -> bool:
        """Whether Tune has the trial."""
        return number in self._live.values()

    def never_promoted(self) -> frozenset[int]:
        """The paused trials that nothing can promote any more, once the search has ended."""
        if self._pauses is None or self.stopping or self.paused:
            return frozenset()
        return self._pauses.never_promoted(*self._told())

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Ray pickles the Tuner into a file that is never read, and what is held here
        has no copy.
        """
        return {}

    def save(self, checkpoint_path: str) -> None:
        """The ledger is the record; Tune's file stays empty."""
        Path(checkpoint_path).touch()

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was saved."""

    def _next_trial(self) -> TrialRecord | None:
        while self._unfinished:
            trial = self._unfinished.pop(0)
            if not self._ledger.trial(trial.number).finished:
                return trial  # else stopped by the user while it waited
        if (promoted := self._promoted()) is not None:
            return promoted
        if self._next_number >= self._spec.trials:
            return None
        if self._spec.search.sampler not in LEARN_NOTHING:  # to which no report makes a difference
            self._settle()
        number = self._next_number
        self._next_number += 1
        proposal = self._proposer.propose(number)  # may take seconds
        self._fence()
        return self._ledger.add(proposal)

    def _tell_past(self, trial: TrialRecord, trial_id: str) -> None:
        """Tell the scheduler what a trial reported, but not a last report whose checkpoint was
        lost: nobody carried the verdict on it out, and the trial will report it again.
        """
        if trial.reports:
            past, last = dict(trial.reports), max(trial.reports)
            if last > trial_store(self._paths, self._spec, trial.number).saved_epoch():
                del past[last]
            replay(self._scheduler, trial_id, past, number=trial.number, finished=False)

    def _promoted(self) -> TrialRecord | None:
        if self._pauses is None or not self._may_promote:
            return None
        self._settle()
        number = self._pauses.next_promotion(*self._told(), live=set(self._live.values()))
        self._may_promote = number is not None  # until somebody else comes to a rung
        if number is not None and self._exploit is not None:
            self._exploit(max(self._ledger.trial(number).reports))
        return None if number is None else self._ledger.trial(number)

    def _told(self) -> tuple[dict[int, dict[int, float]], set[int]]:
        """What all trials have reported, and which of them have no end."""
        trials = self._ledger.frozen_trials()  # a record of each of thousands would take long
        unfinished = {trial.number for trial in trials if not trial.state.is_finished()}
        return {trial.number: trial.intermediate_values for trial in trials}, unfinished
