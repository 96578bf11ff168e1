"""Search: the searcher that stands between the ledger and Ray Tune.

The searcher first hands out the trials that an earlier driver left unfinished, with their numbers
and parameters, and then asks the ledger for new ones. It keeps nothing of its own: its `save`
and `restore` are empty because the ledger is the record. What must not live here: what happens
to a trial afterwards (callbacks), stopping (schedulers), and which point a trial gets (proposals).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from sweeps.layout import SweepPaths
from sweeps.ledger import Ledger, TrialRecord
from sweeps.proposals import Proposer
from sweeps.schedulers import replay
from sweeps.spec import SpecError, SweepSpec
from trainable.ray_adapter import OBJECTIVE


class LedgerSearcher(Searcher):
    """Hands Ray Tune the ledger's trials.

    Args:
        ledger: Where trials come from.
        spec: The sweep; `spec.trials` bounds how many there are.
        paths: Where each trial's directory is.
        scheduler: Is told an unfinished trial's past when Tune gives it a new id.
        concurrency: How many trials may be live at once.
        threads: CPU threads of each trial.
    """

    def __init__(
        self,
        ledger: Ledger,
        spec: SweepSpec,
        paths: SweepPaths,
        scheduler: TrialScheduler,
        *,
        concurrency: int,
        threads: int,
    ) -> None:
        super().__init__(metric=OBJECTIVE, mode=spec.mode)
        self._ledger = ledger
        self._spec = spec
        self._paths = paths
        self._scheduler = scheduler
        self._proposer = Proposer(spec, ledger)
        self._concurrency = concurrency
        self._threads = threads
        trials = ledger.trials()
        self._unfinished = [trial for trial in trials if not trial.finished]
        self._next_number = len(trials)
        self._live: dict[str, int] = {}
        self.draining = False
        """Set to end the sweep after the live trials: no further one is handed out."""

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
        while not self.draining:
            trial = self._next_trial()
            if trial is None:
                break
            try:
                config = self._spec.trial_config(trial.number, trial.params)
            except SpecError as error:
                self._ledger.finish(trial.number, "failed", reason=f"config: {error}")
                continue
            if trial.reports:
                replay(self._scheduler, trial_id, trial.reports, finished=False)
            self._live[trial_id] = trial.number
            resolved = config.model_dump(mode="json")
            if trial.accumulation:
                resolved["train"]["accumulation"] = trial.accumulation
            return {
                "number": trial.number,
                "params": trial.params,
                "config": resolved,
                "directory": str(self._paths.trial(trial.number)),
                "drain": str(self._paths.drain),
                "stop": str(self._paths.stop(trial.number)),
                "halve_batch": self._spec.failures.out_of_memory == "halve_batch",
                "threads": self._threads,
            }
        return Searcher.FINISHED

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        """A slot is free; what the trial's end means is the bookkeeper's business."""
        del result, error
        self._live.pop(trial_id, None)

    def is_live(self, number: int) -> bool:
        """Whether Tune has the trial."""
        return number in self._live.values()

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
        if self._next_number >= self._spec.trials:
            return None
        number = self._next_number
        self._next_number += 1
        return self._ledger.add(self._proposer.propose(number))
