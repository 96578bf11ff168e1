"""Opening a sweep: its ledger, its recorder, and what an earlier driver left half done put right.

Whoever opens a sweep holds its lock. What must not live here: what is wrong with a sweep and how
that is put right (`reconcile`, `corrections`), and running it (`run`).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ray.tune.schedulers import TrialScheduler

from sweeps.checkpoint_locations import trial_files, trial_store
from sweeps.config.logged_params import flatten
from sweeps.config.provenance_check import Origin, OriginChanged, check_origin
from sweeps.config.resume_checks import check_search_changes
from sweeps.config.revisions import (
    changes,
    describe_changes,
    read_revisions,
    read_spec,
    write_spec,
)
from sweeps.config.spec import SpecError, SweepSpec
from sweeps.early_stopping.schedulers import make_scheduler, make_verdict_fn
from sweeps.engine.process_cleanup import untagged_env
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.location import LedgerLocation, check_kept, ledger_location
from sweeps.ledger.reader import TrialRecord
from sweeps.ledger.warm_start import collect_warm_start
from sweeps.paths import SweepPaths, tracking_place
from sweeps.policies.stop_criteria import (
    BY_THE_SWEEP,
    StopCriterionMet,
    active_stop_criterion,
)
from sweeps.reconciliation.collect_state import read_sweep_state
from sweeps.reconciliation.reconcile import reconcile
from sweeps.reconciliation.repairs import apply, close_stores
from sweeps.reconciliation.store_check import Missing, lost_runs
from sweeps.recording.locked_recorder import LockedRecorder
from sweeps.recording.tags import SWEEP_GOES_ON, attempt_tags, curve_tags, leaders_views
from sweeps.results.messages import lost_runs as tell_lost_runs
from sweeps.store_access import reach_tracking
from tracking.mlflow_recorder import MlflowRecorder, set_target, tell_again
from tracking.provenance import provenance
from tracking.recorder import Recorder
from tracking.store_reader import StoreUnreadable
from trainable.metrics_file import FILE_NAME
from trainable.rules import BUILT

_OF_TRIALS = {"task", "seed", "budget", "space", "search", "early_stopping", "train", "checkpoint"}
"""The sections of a spec that say what is trained, and how."""


@dataclass(frozen=True)
class SweepSession:
    """A sweep in the hands of its driver."""

    paths: SweepPaths
    spec: SweepSpec
    ledger: Ledger
    recorder: Recorder
    """Records for as long as the sweep is its driver's."""
    tracking: MlflowRecorder
    """Where to."""
    lost_runs: str | None = None
    """What the tracking store has lost of the sweep, in a sentence."""

    def scheduler(self) -> TrialScheduler:
        """A fresh scheduler, which knows nothing of the past."""
        return make_scheduler(self.spec)

    @property
    def stopped(self) -> StopCriterionMet | None:
        """The stop that ends the sweep before all of its trials are; None without one."""
        return active_stop_criterion(self.spec, self.ledger.trials(), self.ledger.seconds)

    @property
    def num_trials(self) -> int:
        """How many trials the sweep is to have. See `SweepStatus`."""
        return max(self.spec.trials, len(self.ledger.trials()))

    @property
    def num_remaining(self) -> int:
        """How many trials are still to come to their end, or to be begun."""
        trials = self.ledger.trials()
        unfinished = sum(not trial.finished for trial in trials)
        return unfinished + (0 if self.stopped else max(0, self.spec.trials - len(trials)))

    def no_effect_warning(self, before: SweepSpec) -> str | None:
        """Return in a sentence that what was changed finds nothing to train; None where it does,
        and where it is about something else.

        Args:
            before: The sweep's spec as it was.
        """
        changed = {key.partition(".")[0] for key in changes(before, self.spec)}
        if self.num_remaining or not changed & _OF_TRIALS:
            return None
        stop, num_trials = self.stopped, len(self.ledger.trials())
        most = self.spec.max_trials(2 * num_trials)
        more = (
            stop.continue_overrides if stop else (f"trials={most}",) if most > num_trials else ()
        )
        words = [word for change in more for word in ("-s", change)]
        resume = self.paths.command("resume", *words)
        remedy = (
            f"begin some with: {resume}"
            if words
            else "start a new sweep with: sweep run FILE --name NAME"
        )
        return f"nothing is left to train; what changed holds for new trials; {remedy}"

    def reconcile(self, warn: Callable[[str], None]) -> None:
        """Put right what an earlier driver left half done; a new sweep is a case like any other.

        Raises:
            LedgerError: The ledger lost trials.
            StrangerInTheWay: A new trial would find files that are not its own.
        """
        paths, spec, ledger = self.paths, self.spec, self.ledger
        if self.lost_runs is not None:
            warn(self.lost_runs)
        if not ledger.trials() and (told := ledger.warm_start.told):
            warn(told)

        for sentence in self._lost_files():
            warn(sentence)
        stop = self.stopped
        facts = read_sweep_state(
            paths,
            spec,
            ledger.trials(),
            live=False,
            judge=make_verdict_fn(spec),
            stop=BY_THE_SWEEP + stop.why if stop else None,
        )
        apply(
            reconcile(facts),
            paths,
            spec,
            ledger,
            self.recorder,
            warn=warn,
        )

    def _lost_files(self) -> Iterator[str]:
        """Say which files of trials that were trained are gone, and what that means."""
        for trial in self.ledger.trials():
            directory = self.paths.trial(trial.number)
            is_gone = not directory.is_dir()
            local = self.spec.storage.checkpoints is None
            if trial.finished:
                if trial.reports and is_gone:
                    lost = "curve and checkpoints" if local else "curve"
                    yield (
                        f"trial {trial.number} keeps its end, and its {lost} are gone: there is "
                        f"no {directory}"
                    )
            elif trial.reports:
                if is_gone and local:
                    yield f"trial {trial.number} begins again: its directory is gone ({directory})"
                elif local and not (directory / "checkpoints").is_dir():
                    yield f"trial {trial.number} begins again: its checkpoints are gone"
                elif not (directory / FILE_NAME).exists():
                    yield (
                        f"trial {trial.number} goes on, and the curve before that is gone: there "
                        f"is no {directory / FILE_NAME}"
                    )

    def close_stores(self) -> None:
        """Close what workers left open that were killed; none of them may live any more."""
        close_stores(
            trial_files(self.paths, self.spec, trial.number) for trial in self.ledger.trials()
        )


def open_sweep(
    paths: SweepPaths,
    spec: SweepSpec,
    origin: Origin,
    *,
    new: bool,
    accept_changes: bool = False,
    offline: bool = False,
    place: LedgerLocation | None = None,
    fence: Callable[[], None],
) -> SweepSession:
    """Open a sweep, or create it.

    Args:
        fence: Called before anything is recorded; raises when another driver may run the sweep
            by now.
        place: Of its ledger, whose lock the caller holds; None: as the spec says.

    Raises:
        LedgerError: The ledger cannot be used; `LedgerBusy` when another process holds it.
        OriginChanged: Trials before and after could not be compared.
        StorageError: The object store that has its checkpoints cannot be reached.
    """
    ledger = open_ledger(paths, spec, origin, new=new, accepted=accept_changes, place=place)
    now = {**provenance(), **ledger.origin.tags()}
    ledger.note_attempt(now)
    where = (
        tracking_place(spec.tracking.uri, paths.root) if offline else reach_tracking(paths, spec)
    )
    uri, artifacts = where
    lost = None if new or offline else _find_lost_runs(paths, spec, ledger)
    set_target(paths.outbox, uri)
    tracking = MlflowRecorder(
        uri=uri,
        artifact_root=artifacts,
        experiment=spec.name,
        sweep_id=ledger.sweep_id,
        outbox=paths.outbox,
        tags={
            **attempt_tags(ledger.attempts),
            **curve_tags([one.tracking.every for one in read_revisions(paths.spec)]),
            **({} if new else SWEEP_GOES_ON),
        },
        inherited=now,
        experiment_tags=leaders_views(spec, ledger.sweep_id),
        params=dict(flatten(spec.model_dump(mode="json"))),
        offline=offline,
        process=untagged_env(),
    )
    return SweepSession(paths, spec, ledger, LockedRecorder(tracking, fence), tracking, lost)


def _find_lost_runs(paths: SweepPaths, spec: SweepSpec, ledger: Ledger) -> str | None:
    """Have runs told again that the store has lost; return a sentence about them."""
    trials = ledger.trials()
    try:
        found = lost_runs(paths, spec, trials, ledger.sweep_id, untagged_env())
    except StoreUnreadable as error:  # a server that is away stops no sweep
        return str(error)
    lost = {one.trial: one.is_gone for one in found if not one.is_deleted}
    tell_again(paths.outbox, lost)
    return tell_lost_runs(Missing.of(found), 1 + len(trials), paths) if found else None


def open_ledger(
    paths: SweepPaths,
    spec: SweepSpec,
    origin: Origin,
    *,
    new: bool,
    accepted: bool,
    place: LedgerLocation | None = None,
) -> Ledger:
    """The spec's file is the commit point: a sweep exists once it is there, and its ledger was
    made before.
    """
    place = place or ledger_location(paths, spec)
    if new:
        place.remove_incomplete(paths.spec)
        warm = collect_warm_start(paths.root, spec)
        ledger = Ledger.create(place, mode=spec.mode, sweep_id=uuid.uuid4().hex)
        if warm.told:
            ledger.note_warm_start(warm)
    else:
        before = read_spec(paths.spec).spec
        check_kept(paths, before, spec)
        ledger = Ledger.open(place)
        # Where nothing has been trained yet, there is nothing to compare with.
        accepted = accepted or not _has_trained(paths, before, ledger.trials())
        check_origin(ledger.origin, origin, before, spec, accepted=accepted)
        if not accepted:
            _check_reported_trials(paths, before, spec, ledger.trials())
        check_search_changes(before, spec, len(ledger.trials()))
        if accepted:  # what they build anew is then what they go on from
            for trial in ledger.trials():
                (paths.trial(trial.number) / BUILT).unlink(missing_ok=True)
    ledger.note_origin(origin)
    write_spec(paths.spec, spec)
    return ledger


def _has_trained(paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialRecord]) -> bool:
    """Whether a trial has reported, or goes on from a checkpoint. Stores are asked last, and no
    more of them than it takes: those of objects answer slowly, and for money. Who died right
    after a trial's start may not have counted the attempt.
    """
    begun = sorted((one for one in trials if not one.finished), key=lambda one: -one.attempts)
    return any(trial.reports for trial in trials) or any(
        trial_store(paths, spec, trial.number).generations() for trial in begun
    )


def _check_reported_trials(
    paths: SweepPaths, before: SweepSpec, after: SweepSpec, trials: Sequence[TrialRecord]
) -> None:
    """Refuse to train again with another configuration what was told already.

    Raises:
        OriginChanged: With the first trial that would be.
    """
    for trial in trials:
        if trial.finished or not trial.reports:
            continue
        differing = _config_diff(before, after, trial)
        if not differing:
            continue
        told, saved = max(trial.reports), trial_store(paths, before, trial.number).saved_epoch()
        if saved < told:
            raise OriginChanged(
                f"trial {trial.number} has reported epoch {told} and saved epoch {saved}: what "
                "lies between is trained again, and ledger and tracking keep what they were told "
                f"first; with another configuration ({differing}) that would be the curve of "
                f"another training; resume as it was until the trial has saved epoch {told} or "
                "ended, or go on nevertheless with --accept-changes"
            )


def _config_diff(before: SweepSpec, after: SweepSpec, trial: TrialRecord) -> str:
    """Return in one line with what a trial would now be trained otherwise; parameters are its own,
    and of what stands outside of `train` it is `check_origin` that decides.
    """
    try:
        was, now = (spec.trial_config(trial.number, trial.params) for spec in (before, after))
    except SpecError:  # its values are no configuration any more: it fails and is not trained
        return ""
    return describe_changes(was.train, now.train, "train.")
