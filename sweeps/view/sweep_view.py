"""What is known of a sweep, read from its ledger, lock, outbox and checkpoints while it runs, too.

What must not live here: printing, and anything that writes to a sweep.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from sweeps.errors import NO_SUCCESS, LedgerError, RevisionError, SpecError, UserError
from sweeps.formatting import counted
from sweeps.ledger.attributes import Abort
from sweeps.ledger.over_seeds import weights_of
from sweeps.ledger.ranking import closest, front_so_far
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.trials import TrialSummary, of_search
from sweeps.paths import SweepPaths, list_sweeps, resolve_root
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.extra_training import (
    SeriesResult,
    SweepTrials,
    TrialSeries,
    read_series,
)
from sweeps.reconcile.failure_policy import remedy
from sweeps.reconcile.finishing import can_offer_finish
from sweeps.reconcile.reconcile import OF_TRACKING, Correction, UnknownDirectory, reconcile
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.revisions import read_spec
from sweeps.spec.space import configured
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.rule import make_pausing_rule
from sweeps.stores import best_generation, lost_weights, saved_generation, trial_files, trial_store
from sweeps.sweep_lock import describe_foreign_lock, is_held, read_holder
from sweeps.view.outcome import (
    INFEASIBLE,
    SweepFailure,
    SweepOutcome,
    Waiting,
    find_failure,
    infeasible_sentence,
    num_retryable,
)
from tracking.notifications import Undelivered
from tracking.outbox_status import DeliveryStatus, read_outbox
from tracking.trusted_stores import StoreUntrusted
from trainable.store.metrics_file import CurveDamaged, read_rows
from trainable.store.notes import latest_tested

_REQUESTS = 16
"""Parallel requests to an object store."""
STATES = ("waiting", "running", "complete", "pruned", "failed")


class UnknownSweep(ValueError):
    """There is no sweep of that name.

    Examples:
        >>> from sweeps import UnknownSweep
        >>> try:
        ...     Sweep.open("misspelled")
        ... except UnknownSweep as error:
        ...     print(error)
    """

    def __init__(self, name: str, root: Path) -> None:
        names = [paths.name for paths in list_sweeps(root)]
        near = difflib.get_close_matches(name, names, n=3)
        there = (
            f"the sweeps there are: {', '.join(names)}"
            if names
            else "there are no sweeps there yet"
        )
        hint = (
            f"did you mean {' or '.join(repr(n) for n in near)}?"
            if near
            else f"{there}; if it is elsewhere, name its directory with --root DIR or SWEEP_ROOT"
        )
        if left := SweepPaths(root, name).left_without_spec():
            super().__init__(
                f"sweep '{name}' below {root} has lost its sweep.yaml, which describes the sweep; "
                f"{' and '.join(left)} are left there and stay unchanged; restore sweep.yaml from "
                "a backup, or from the artifacts of the sweep's own MLflow run"
            )
            return
        super().__init__(f"there is no sweep '{name}' below {root}; {hint}")


class UnknownTrial(ValueError):
    """The sweep has no trial of that number."""


class NoBest(Exception):
    """No trial has ended with a value, so there is no best trial."""


class NoChoice(ValueError):
    """Several trials are the best, and the user has chosen none of them."""


class SweepView:
    """One sweep, read once at construction."""

    def __init__(self, paths: SweepPaths) -> None:
        if not paths.exists():
            raise UnknownSweep(paths.name, paths.root)
        self.paths = paths
        self.revision = read_spec(paths.spec)
        self.spec: SweepSpec = self.revision.spec
        self.damage = self.revision.damage
        self.running = is_held(paths.lock)
        self.holder = read_holder(paths.lock) if self.running else None
        self.stranger = describe_foreign_lock(paths.lock)
        """A message if a process locked the sweep that is no driver; else None."""
        self.ledger = LedgerReader(paths.ledger)
        self.records = self.ledger.trials
        self.delivered: DeliveryStatus = read_outbox(paths.outbox)
        self.sweep_trials = SweepTrials(
            paths, self.spec, self.records, self.ledger.seconds, self._read_series()
        )
        self.stop = self.sweep_trials.stop
        """The criterion that ends the sweep before all of its trials have run."""
        self._pauses = make_pausing_rule(self.spec)

    def _read_series(self) -> TrialSeries | None:
        try:
            return read_series(self.ledger.series)
        except (
            Exception
        ) as error:  # a damaged value can raise any error, as in `LedgerFile.reading`
            reason = f"{type(error).__name__}: {error}"
            raise LedgerFile(self.paths.ledger).damaged(reason) from error

    @classmethod
    def open(cls, name: str, root: str | Path | None = None) -> SweepView:
        """Read a sweep by its name."""
        return cls(SweepPaths(resolve_root(None if root is None else Path(root)), name))

    @property
    def warnings(self) -> list[str]:
        """Damaged files, and a process that blocks the lock, a sentence each."""
        return [one for one in (self.damage, self.delivered.damage, self.stranger) if one]

    @property
    def state(self) -> str:
        """`running`, `interrupted`, `finished` or `failed`."""
        if self.running:
            return "running"
        if self.num_left:
            return "interrupted"
        return "finished" if self.ledger.front() else "failed"

    @property
    def num_left(self) -> int:
        """How many trials have not ended, or not started."""
        return self.sweep_trials.num_left

    @property
    def abort(self) -> Abort | None:
        """Why the sweep stopped itself; None if it did not, or if that prevented no trial."""
        hindered = not self.running and (self.num_left or not self.ledger.front())
        return self.ledger.abort if hindered else None

    def resume_hint(self) -> str:
        """Return how to continue a sweep that no driver runs, for a message."""
        if self.spec.is_of_script:
            return "continue the sweep by running its script or notebook again"
        if self.state == "interrupted" and self.abort is None:
            return f"resume the sweep with: {self.paths.command('resume')}"
        return f"how to continue the sweep: {self.paths.command('status')}"

    @property
    def concluded(self) -> bool:
        """Whether nothing is left to do: no trial, publication, delivery or repair."""
        done = self.state in ("finished", "failed") and not self.delivered.pending
        return (
            done
            and self.ledger.num_published == len(self.records)
            and all(isinstance(wrong, UnknownDirectory) for wrong in self.corrections())
        )

    def corrections(self) -> list[Correction]:
        """The repairs that a resume would make; nothing is changed here."""
        found = reconcile(
            read_sweep_state(self.paths, self.spec, self.ledger.records(), live=self.running)
        )
        if self.spec.is_of_script:  # which records nothing: `sweep sync` does
            return [one for one in found if not isinstance(one, OF_TRACKING)]
        return found

    def outcome(self) -> SweepOutcome:
        """Return how a sweep ended, or why it stopped itself; not of a running one."""
        best, abort, failure = self.best_so_far(), self.abort, None
        if abort is not None:
            failure = SweepFailure(abort.why, abort.trial, abort.kind, is_aborted=True)
        elif self.state == "failed":
            failure = find_failure(self.records)
        return SweepOutcome(
            exit_code=NO_SUCCESS if failure else 0,
            metrics=self.spec.metrics,
            best=best,
            num_retryable=num_retryable(self.spec, self.records),
            can_finish=len(best) == 1 and can_offer_finish(self.spec, best[0], self.records),
            lost_weights=self.lost_weights(*self.ledger.front()),
            num_trials=len(of_search(self.records)),
            max_trials=self.spec.max_trials(2 * len(of_search(self.records))),
            num_left=self.num_left,
            stop=self.stop,
            failure=failure,
            waiting=Waiting(notifications=self.undelivered),
        )

    def best_so_far(self) -> list[TrialSummary]:
        """Return the best trials, those that have not ended included; none without a value."""
        return front_so_far(self.records, self.ledger.minimizes)

    def finish_command(self, record: TrialSummary) -> str | None:
        """Return the command that trains a pruned trial to its end; None if none is offered."""
        if self.spec.is_of_script or not can_offer_finish(self.spec, record, self.records):
            return None
        return self.paths.command("resume", str(record.number), "--finish")

    @property
    def undelivered(self) -> Undelivered | None:
        """The notifications that wait for the webhook; None if none does."""
        count = self.delivered.notifications
        return Undelivered(count, None) if count and self.spec.notify.webhook else None

    def lost_weights(self, *records: TrialSummary) -> str | None:
        """Return why none of these trials has weights: see `stores`."""
        return lost_weights(self.paths, self.spec, [*map(self.weights_of, records)])

    def trial_state(self, record: TrialSummary) -> str:
        """A trial's state; an unfinished trial without a worker is `waiting`."""
        if record.state != "running":
            return record.state
        is_new = not (record.attempts or record.epoch)  # its workers may not fit yet
        if not self.running or is_new:
            return "waiting"
        # A trial at a rung that was promoted runs once it has a worker.
        paused = (
            self._pauses
            and record.role == "search"
            and not record.exempt
            and record.epoch in self._pauses.rungs
            and not self._is_open(record.number)
        )
        return "waiting" if paused else "running"

    def _is_open(self, number: int) -> bool:
        """Whether a worker has a trial's checkpoints open."""
        return trial_files(self.paths, self.spec, number).has_writer()

    @property
    def num_unstarted(self) -> int:
        """How many trials do not exist yet, which a sweep's status counts as waiting."""
        known = self.sweep_trials
        return known.num_missing + (known.num_unstarted if self.stop is None else 0)

    def counts_in_words(self, counts: Mapping[str, int]) -> str:
        """Return how many trials are in each state; waiting ones are those that are listed."""
        listed = {**counts, "waiting": counts["waiting"] - self.num_unstarted}
        words = [f"{count} {state}" for state, count in listed.items() if count]
        if self.num_unstarted:
            words.append(f"{self.num_unstarted} not started")
        return ", ".join(words)

    @property
    def num_trials(self) -> int:
        """The number of trials: those that exist, and those of the spec that have not started."""
        known = self.sweep_trials
        return len(self.records) + known.num_unstarted + known.num_missing

    @cached_property
    def series_result(self) -> SeriesResult | None:
        """What the last series of extra trials says; None without one."""
        series = self.sweep_trials.series
        return None if series is None else series.result(self.spec, self.records)

    def with_spec(self, spec: SweepSpec) -> SweepTrials:
        """Return the sweep as it resumes with an edited spec."""
        return replace(self.sweep_trials, spec=spec)

    def status(self) -> dict[str, Any]:
        """Return what `sweep list --json` prints of a sweep."""
        reason = self.stop or self.abort
        counts = Counter(self.trial_state(record) for record in self.records)
        counts["waiting"] += self.num_unstarted
        near = closest(self.records)
        best = [
            {
                "number": one.number,
                "value": one.result,
                "params": configured(self.spec.space, one.best_params),
            }
            for one in self.best_so_far()
        ]
        return {
            "name": self.paths.name,
            "state": self.state,
            "trials": {state: counts[state] for state in STATES},
            "num_trials": self.num_trials,
            "configurations": self._configurations(),
            "stopped_by": reason and {"key": reason.key, "why": reason.why},
            "best": best if self.several else best[0] if best else None,
            "closest": None if near is None else {"number": near.number, **feasibility(near)},
            "outbox_pending": self.delivered.pending,
            "outbox_held": self.delivered.blocked_artifacts,
            "outbox_refused": self.delivered.refused,
            "mlflow_experiment_id": self.delivered.experiment_id,
            "mlflow_run_id": self.delivered.sweep_run_id,
        }

    def _configurations(self) -> dict[str, int] | None:
        """Return how many configurations are in each state; None with one seed each."""
        if self.spec.repeats.seeds == 1:
            return None
        counts = Counter(one.over_seeds.state for one in self.records if one.over_seeds)
        if self.stop is None:
            counts["waiting"] = max(0, self.spec.num_trials - counts.total())
        return {state: counts[state] for state in STATES}

    @property
    def several(self) -> bool:
        """Whether the sweep has several metrics, so that several trials may be the best."""
        return len(self.spec.metrics) > 1

    def best(self, number: int | None = None) -> dict[str, Any]:
        """Return the object that `sweep best --json` prints; see `select_trial`.

        Of a configuration with several seeds, the checkpoints are those of `select_weights`.
        """
        found, weights = self.trial(self.select_trial(number)), self.select_weights(number)
        if weights.number == found["number"]:
            return found
        of_weights = self.trial(weights)
        return found | {key: of_weights[key] for key in ("checkpoint", "best_checkpoint", "test")}

    def select_weights(self, number: int | None) -> TrialSummary:
        """Return the trial whose weights are exported and tested; see `select_trial`.

        With `repeats`, the seed whose value is closest to the configuration's stands for the best
        one.
        """
        record = self.select_trial(number)
        return record if number is not None else self.weights_of(record)

    def weights_of(self, record: TrialSummary) -> TrialSummary:
        """Return the trial whose weights stand for a configuration, or for a single trial."""
        return weights_of(record, self.records)

    def select_trial(self, number: int | None) -> TrialSummary:
        """Return the trial that `number` names, whatever its state; the best one by default."""
        name = self.paths.name
        if number is not None:
            record = self.record(number)
            if record.value is None:
                see = self.paths.command("show", str(number))
                raise NoBest(f"trial {number} of sweep '{name}' has no value yet; see: {see}")
            return record
        best, see = self.front(), self.paths.command("best")
        if len(best) == 1:
            return best[0]
        numbers = ", ".join(str(record.number) for record in best)
        raise NoChoice(
            f"{len(best)} trials of sweep '{name}' are on the Pareto front: {numbers}; none of "
            f"them is the best in all metrics; see: {see}, and name one as TRIAL"
        )

    def front(self) -> list[TrialSummary]:
        """Return the best trial, or with several metrics the Pareto front."""
        front = self.ledger.front()
        if not front and (near := closest(self.records)) is not None:
            raise NoBest(
                f"{infeasible_sentence(near)}; {remedy(INFEASIBLE)}; see: "
                f"{self.paths.command('trials')}"
            )
        if not front:
            final = self.spec.select == "final"
            ended = "trained to its end, as select: final needs" if final else "ended with a value"
            if (repeats := self.spec.repeats).seeds > 1:
                every = counted(repeats.seeds, repeats.word)
                ended = f"trained to its end with all of its {every}"
            raise NoBest(
                f"no trial of sweep '{self.paths.name}' has {ended}; "
                f"see: {self.paths.command('trials')}"
            )
        return front

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `sweep trials`, without looking at checkpoints."""
        return [self._row(record) for record in self.records]

    def trials(self) -> list[dict[str, Any]]:
        """Return the list that `sweep trials --json` prints."""
        if self.spec.storage.checkpoints is None:
            return [self.trial(record) for record in self.records]
        with ThreadPoolExecutor(_REQUESTS) as pool:  # each trial takes ten requests
            return list(pool.map(self.trial, self.records))

    def trial(self, record: TrialSummary) -> dict[str, Any]:
        """Return one trial with its checkpoints and its metrics on test data.

        `best_checkpoint` is None if it is lost, `test` if the trial was not tested.
        """
        tested = latest_tested(self.paths.trial(record.number))
        saved = trial_store(self.paths, self.spec, record.number).generations()
        best = saved_generation(saved, self.spec, record)
        return {
            **self._row(record),
            "checkpoint": saved[-1].address if saved else None,
            "best_checkpoint": best and best.address,
            "test": None if tested is None else tested.metrics,
        }

    def details(self, number: int) -> dict[str, Any]:
        """Return the object that `sweep show --json` prints."""
        record = self.record(number)
        config = self.config(record)  # a resume may have changed the spec
        workers = config.get("workers", 1)
        return {
            **self.trial(record),
            "reports": self.ledger.reports_of(number),
            "lineage": [mutation._asdict() for mutation in record.lineage],
            "accumulation": record.accumulation,
            "workers": workers if workers > 1 else None,
            "cpu_seconds": record.cpu_seconds,
            "gpu_seconds": record.gpu_seconds,
            "gpu_use": _gpu_use(self.paths.trial(number)) if record.gpu_seconds else None,
            "health": [*(record.signals or ())],
            "lost_workers": [*record.lost_workers],
            "failed_attempts": [one._asdict() for one in record.failed_attempts],
            "traceback": record.traceback,
            "directory": str(self.paths.trial(number)),
        }

    def checkpoint(self, record: TrialSummary) -> str:
        """Return where the checkpoint of a value is: a directory, or a prefix of objects."""
        found = best_generation(self.paths, self.spec, self.weights_of(record))
        if isinstance(found, str):
            raise NoBest(found)
        return found.address

    def config(self, record: TrialSummary) -> dict[str, Any]:
        """Return the resolved configuration with which a trial trained."""
        return load_trial_config(self.paths, self.spec, record)

    def _row(self, record: TrialSummary) -> dict[str, Any]:
        return {
            "number": record.number,
            "state": self.trial_state(record),
            "params": configured(self.spec.space, record.best_params),
            "value": record.result,
            **feasibility(record),
            "step": record.step,
            "epoch": record.epoch,
            "attempts": record.attempts,
            "reason": record.reason,
            "started_at": _iso(record.started_at),
            "ended_at": _iso(record.ended_at),
            "duration": record.seconds,
            "finishes": record.finishes,
            "role": record.role,
            "origin": record.origin,
            "seed_index": record.seed_index,
            "exempt": record.exempt,
            "would_stop_at": record.would_stop_at,
            "would_stop_reason": record.would_stop_reason,
            "from_priors": record.from_priors,
            "over_seeds": record.over_seeds and record.over_seeds.as_dict(),
            "mlflow_run_id": self.delivered.run_ids.get(record.number),
        }

    def record(self, number: int) -> TrialSummary:
        """Return one trial's record."""
        if not 0 <= number < len(self.records):
            raise UnknownTrial(
                f"sweep '{self.paths.name}' has no trial {number}; "
                f"its trials are 0 to {len(self.records) - 1}"
                if self.records
                else f"sweep '{self.paths.name}' has no trials yet"
            )
        return self.records[number]


def feasibility(record: TrialSummary) -> dict[str, Any]:
    """Return whether a trial is feasible, and by how much it misses which limits, as JSON."""
    return {
        "feasible": record.feasible,
        "violations": record.limits.missed(record.judged) if record.judged else {},
    }


def _gpu_use(directory: Path) -> dict[str, float] | None:
    """Return the medians of what a trial's reports say of its GPU; None if they say nothing."""
    try:
        rows = read_rows(directory)
    except CurveDamaged:  # `sweep doctor` says so
        return None
    found = {}
    for metric in ("gpu/utilization_percent", "gpu/memory_percent"):
        if values := [row.metrics[metric] for row in rows if metric in row.metrics]:
            found[metric] = median(values)
    return found or None


def _iso(time: datetime | None) -> str | None:
    """Return a local time with its offset from UTC."""
    return None if time is None else time.astimezone().isoformat(timespec="seconds")


def statuses(root: Path) -> Iterator[dict[str, Any] | str]:
    """Yield each sweep's status; a sentence if it cannot be read."""
    if root.exists() and not root.is_dir():
        raise UserError(
            f"--root {root}: is a file; the root is the directory that holds all sweeps; "
            "name that directory"
        )
    yield from map(_status, list_sweeps(root))


def _status(paths: SweepPaths) -> dict[str, Any] | str:
    try:
        return SweepView(paths).status()
    except (RevisionError, SpecError, LedgerError, StoreUntrusted, OSError) as error:
        return str(error)  # the other sweeps are still listed
