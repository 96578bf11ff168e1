"""Open a sweep's ledger and recorder, and reconcile what an earlier driver left unfinished.

The caller holds the sweep's lock. What must not live here: deciding what to repair, the repairs
themselves (`reconcile`), and running the trials (`driver`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from sweeps.engine.process_cleanup import untagged_env
from sweeps.engine.provenance import provenance
from sweeps.errors import OriginChanged, SpecError
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.over_seeds import check_repeats, origins, repeats_of
from sweeps.ledger.reasons import BY_THE_SWEEP
from sweeps.ledger.sqlite import LedgerFile
from sweeps.ledger.trials import TrialRecord, of_search, places
from sweeps.ledger.warm_start import collect_warm_start
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.extra_training import PlannedExtra, SweepTrials, read_series
from sweeps.reconcile.finishing import check_free, check_unfinished, make_directories
from sweeps.reconcile.reconcile import reconcile
from sweeps.reconcile.repairs import apply, close_stores, follow_logs
from sweeps.reconcile.retrying import complete_retries
from sweeps.reconcile.stop_criteria import more_trials
from sweeps.recording.notifications import Notifier
from sweeps.recording.tags import SWEEP_RESUMED, curve_tags, open_recorder
from sweeps.run.prepared import PreparedSweep
from sweeps.run.store_comparison import Missing, lost_runs
from sweeps.spec.resume_checks import check_origin, check_search_changes, workers_tag
from sweeps.spec.revisions import changes, describe_changes, read_revisions, read_spec, write_spec
from sweeps.spec.searched_workers import does_not_fit
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.schedulers import make_verdict_fn
from sweeps.stores import (
    check_kept,
    check_no_copy,
    find_tracker,
    open_notifications,
    place_of,
    tracker_at,
    trial_files,
    trial_store,
)
from tracking.notifications import NotificationDelivery
from tracking.recorder import BeforeRecords, Recorder, reset_trials, set_target
from tracking.tracker import StoreUnreadable
from trainable.store.metrics_file import FILE_NAME
from trainable.user_code.fingerprint import BUILT

_OF_TRIALS = {"task", "seed", "budget", "space", "search", "early_stopping", "train", "checkpoint"}
"""The sections of a spec that affect which trials train, and how."""


class Notifications(NamedTuple):
    """What queues a sweep's notifications, and what delivers them."""

    notifier: Notifier
    delivery: NotificationDelivery


@dataclass(frozen=True)
class SweepSession:
    """An open sweep, for the time in which its driver holds the lock."""

    paths: SweepPaths
    spec: SweepSpec
    ledger: Ledger
    recorder: Recorder
    """Raises an error instead of recording after the driver has lost the lock."""
    fence: Callable[[], None]
    """Raises an error once the driver has lost the lock; called before each write."""
    lost_runs: str | None = None
    """A sentence about the runs that the tracking store has lost; None if it has lost none."""
    notifications: Notifications | None = None
    """None if the sweep has no webhook."""
    only_extra: bool = False
    """Whether this driver runs extra trials and none of the search."""

    def trials(self) -> SweepTrials:
        """Return what the ledger says now."""
        ledger = self.ledger
        series = read_series(ledger.series)
        return SweepTrials(self.paths, self.spec, ledger.trials(), ledger.seconds, series)

    def most_trials(self) -> int:
        """Return how many trials the sweep has at most when this driver has ended."""
        known = self.trials()
        new = 0 if self.only_extra else known.num_unstarted
        more = 0 if known.series is None else known.series.most(known.trials)
        return len(known.trials) + new + more

    def has_trials_to_run(self) -> bool:
        """Return whether this driver has a trial to run."""
        known = self.trials()
        if not self.only_extra:
            return known.num_left > 0
        extra = [one for one in known.trials if one.role not in ("search", "repeat")]
        return known.num_missing > 0 or not all(one.finished for one in extra)

    def no_effect_warning(self, before: SweepSpec) -> str | None:
        """Return a warning that the changes affect training and no trials remain."""
        changed = {key.partition(".")[0] for key in changes(before, self.spec)}
        known = self.trials()
        if known.num_left or not changed & _OF_TRIALS:
            return None
        more = more_trials(self.spec, len(of_search(known.trials)), known.stop)
        words = [word for change in more for word in ("-s", change)]
        resume = self.paths.command("resume", *words)
        remedy = (
            f"add trials with: {resume}"
            if words
            else "start a new sweep with: sweep run FILE --name NAME"
        )
        return f"no trials remain; the changes affect only new trials; {remedy}"

    def reconcile(self, warn: Callable[[str], None]) -> None:
        """Repair what an earlier driver left unfinished; also called for a new sweep."""
        paths, spec, ledger = self.paths, self.spec, self.ledger
        if self.lost_runs is not None:
            warn(self.lost_runs)
        if not ledger.trials() and (warm_start := ledger.warm_start.summary):
            warn(warm_start)

        make_directories(paths, spec, ledger.trials())
        for sentence in self._lost_files():
            warn(sentence)
        trials, stop = ledger.trials(), self.trials().stop
        state = read_sweep_state(
            paths,
            spec,
            trials,
            live=False,
            judge=make_verdict_fn(spec, origins(trials), places(trials)),
            stop=BY_THE_SWEEP + stop.why if stop else None,
        )
        apply(
            reconcile(state),
            paths,
            spec,
            ledger,
            self.recorder,
            warn=warn,
        )
        follow_logs(state, spec, self.recorder)

    def _lost_files(self) -> Iterator[str]:
        """Yield a sentence for each trained trial that lost files: what is lost, what follows."""
        for trial in self.ledger.trials():
            directory = self.paths.trial(trial.number)
            is_gone = not directory.is_dir()
            local = self.spec.storage.checkpoints is None
            if trial.finished:
                if trial.reports and is_gone:
                    lost = "metrics and checkpoints" if local else "metrics"
                    yield (
                        f"trial {trial.number} has ended and keeps its result, but its {lost} are "
                        f"lost: there is no {directory}"
                    )
            elif trial.reports:
                if is_gone and local:
                    yield f"trial {trial.number} starts again: its directory is lost ({directory})"
                elif local and not (directory / "checkpoints").is_dir():
                    yield f"trial {trial.number} starts again: its checkpoints are lost"
                elif not (directory / FILE_NAME).exists():
                    yield (
                        f"trial {trial.number} resumes, but its earlier metrics are lost: there "
                        f"is no {directory / FILE_NAME}"
                    )

    def close_stores(self) -> None:
        """Close the checkpoint stores that killed workers left open; no worker may be alive."""
        close_stores(
            trial_files(self.paths, self.spec, trial.number) for trial in self.ledger.trials()
        )


def open_sweep(
    prepared: PreparedSweep, fence: Callable[[], None], warn: Callable[[str], None]
) -> SweepSession:
    """Open a sweep, or create it."""
    paths, spec, options = prepared.paths, prepared.spec, prepared.options
    ledger = open_ledger(prepared, warn)
    complete_retries(paths, spec, ledger)
    revisions = read_revisions(paths.spec)
    ledger.add_attempt({**provenance(), **ledger.origin.tags(), **workers_tag(revisions)})
    ledger.store_run_from({**place_of(paths), "code": os.getcwd()})
    offline, root = options.offline, paths.root
    tracker = tracker_at(spec.tracking.uri, root) if offline else find_tracker(paths, spec)
    lost = None if prepared.new or offline else _find_lost_runs(paths, spec, ledger)
    set_target(paths.outbox, tracker)
    notifications = _open_notifications(paths, spec, ledger, offline=offline)
    before = BeforeRecords(fence)
    if notifications is not None:
        before = before._replace(on_finish=notifications.notifier.ended)
    recorder = open_recorder(
        paths,
        spec,
        ledger,
        tags={
            **curve_tags([one.tracking.every for one in revisions]),
            **({} if prepared.new else SWEEP_RESUMED),
        },
        environment=None if offline else untagged_env(),
        before=before,
    )
    return SweepSession(
        paths,
        spec,
        ledger,
        recorder,
        fence,
        lost,
        notifications,
        only_extra=options.extra.only_extra,
    )


def _open_notifications(
    paths: SweepPaths, spec: SweepSpec, ledger: Ledger, *, offline: bool
) -> Notifications | None:
    """Return what notifies of the sweep's events; None if it has no webhook."""
    if spec.notify.webhook is None:
        return None
    delivery = open_notifications(paths, spec, offline=offline)
    attempt = len(ledger.attempts)
    notifier = Notifier(paths, spec, ledger.sweep_id, attempt, ledger, delivery.add)
    return Notifications(notifier, delivery)


def _find_lost_runs(paths: SweepPaths, spec: SweepSpec, ledger: Ledger) -> str | None:
    """Queue for delivery the runs that the tracking store has lost, and describe them."""
    trials = ledger.trials()
    try:
        found = lost_runs(paths, spec, trials, ledger.sweep_id, untagged_env())
    except StoreUnreadable as error:  # the sweep runs even while the server is unavailable
        return str(error)
    lost = {one.trial: one.is_gone for one in found if not one.is_deleted}
    reset_trials(paths.outbox, lost)
    if not found:
        return None
    command = paths.command("sync", "--verify")
    return "; ".join(Missing.of(found).sentences(1 + len(trials), command))


def open_ledger(prepared: PreparedSweep, warn: Callable[[str], None]) -> Ledger:
    """Open or create a sweep's ledger, and write its spec file."""
    paths, spec, origin = prepared.paths, prepared.spec, prepared.origin
    planned = PlannedExtra()
    if prepared.new:
        LedgerFile(paths.ledger).remove_incomplete(paths.spec)
        warm = collect_warm_start(paths.root, spec)
        ledger = Ledger.create(
            paths.ledger,
            mode=spec.mode,
            sweep_id=uuid.uuid4().hex,
            select=spec.select,
            repeats=repeats_of(spec),
            limits=spec.limits,
        )
        if warm.summary:
            ledger.store_warm_start(warm)
    else:
        before = read_spec(paths.spec).spec
        check_kept(paths, before, spec)
        ledger = Ledger.open(paths.ledger)
        accepted = prepared.options.accept_changes
        check_no_copy(paths, spec, ledger.run_from, accepted=accepted)
        planned = plan_resume(prepared, before, ledger)
        ledger.store_limits(spec.limits)
    if not planned.stores_origin:
        ledger.store_origin(origin)
    # A new revision although nothing changed: it says what was asked for.
    # The commit point: a sweep exists once this file does, so its ledger comes first.
    write_spec(paths.spec, spec, planned.note)
    revisions = read_revisions(paths.spec)
    ledger.earlier_budgets = frozenset(one.budget.reports for one in revisions)
    planned.store(ledger)
    for sentence in planned.warnings:
        warn(sentence)
    return ledger


def plan_resume(prepared: PreparedSweep, before: SweepSpec, ledger: Ledger) -> PlannedExtra:
    """Check that a sweep can resume with a spec, and return what it trains besides the search."""
    paths, spec, origin = prepared.paths, prepared.spec, prepared.origin
    extra = prepared.options.extra
    trials = ledger.trials()
    sweep = SweepTrials(paths, spec, trials, ledger.seconds, read_series(ledger.series))
    chosen = extra.choose(sweep)
    again = chosen if extra.reopens else []
    # Without a trained trial there is nothing to compare with.
    others = [one for one in trials if not (extra.starts_over and one.number in chosen)]
    accepted = prepared.options.accept_changes or not _has_trained(paths, before, others)
    check_origin(ledger.origin, origin, before, spec, accepted=accepted)
    if not accepted:
        _check_reported_trials(paths, before, spec, trials)
        # A retried trial that finishes a pruned one must continue it exactly, too.
        running = [replace(t, state="running") if t.number in again else t for t in trials]
        check_unfinished(paths, spec, running)
        if sweep.series is not None:
            sweep.series.check_unchanged(sweep)
    check_search_changes(before, spec, len(of_search(trials)))
    check_repeats(before, spec)
    planned = extra.plan(sweep, chosen, (ledger.origin, origin))
    for index in range(planned.num_new):
        check_free(paths, len(trials) + index)
    _check_workers(paths, spec, trials, planned, prepared.resources.max_workers)
    if accepted:  # trials then resume with the task as it is built now
        for trial in trials:
            (paths.trial(trial.number) / BUILT).unlink(missing_ok=True)
    return planned


def _check_workers(
    paths: SweepPaths,
    spec: SweepSpec,
    trials: Sequence[TrialRecord],
    planned: PlannedExtra,
    most: int,
) -> None:
    """Refuse to resume where a trial would wait for ever, because it has too many workers."""
    issues = [
        does_not_fit(
            trial.number,
            workers,
            most,
            "resume the sweep where they do, or end the trial with: "
            + paths.command("stop", str(trial.number)),
        )
        for trial in trials
        # new trials of the search fit: the spec was checked
        if not trial.finished or trial.number in planned.trains
        if (workers := spec.workers_of(trial.params)) > most
    ]
    if issues:
        raise SpecError(issues)


def _has_trained(paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialRecord]) -> bool:
    """Whether a trial has reported, or resumes from a checkpoint."""
    # Without regard to attempts: a driver that died right after a start may not have counted it.
    unfinished = sorted((one for one in trials if not one.finished), key=lambda one: -one.attempts)
    # Stores come last and one by one: an object store is slow and charges for each request.
    return any(trial.reports for trial in trials) or any(
        trial_store(paths, spec, trial.number).generations() for trial in unfinished
    )


def _check_reported_trials(
    paths: SweepPaths, before: SweepSpec, after: SweepSpec, trials: Sequence[TrialRecord]
) -> None:
    """Refuse a configuration change if a trial would train again what it has reported."""
    for trial in trials:
        if trial.finished or not trial.reports:
            continue
        differing = _config_diff(before, after, trial)
        if not differing:
            continue
        epoch, word = max(trial.reports), before.budget.report_word
        saved = trial_store(paths, before, trial.number).saved_epoch()
        if saved < epoch:
            raise OriginChanged(
                f"trial {trial.number} has reported {word} {epoch} and saved {word} {saved}, so "
                f"it trains the {word}s between again; ledger and tracking keep the first "
                f"reports, which would not fit the changed configuration ({differing}); resume "
                f"without the change until the trial has saved {word} {epoch} or ended, or "
                "resume with --accept-changes"
            )


def _config_diff(before: SweepSpec, after: SweepSpec, trial: TrialRecord) -> str:
    """Return in one line how a trial's `train` section changes; empty without a change.

    A trial keeps its own parameters, and `check_origin` compares the other sections.
    """
    try:
        was, now = (spec.trial_config(trial.seed, trial.params) for spec in (before, after))
    except SpecError:  # the changed spec refuses its values: the trial fails without training
        return ""
    return describe_changes(was.train, now.train, "train.")
