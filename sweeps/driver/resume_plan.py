"""Check that a sweep can resume with a spec, and plan what it trains besides the search.

What must not live here: any change of the ledger or of the spec file (`session`), and what of a
search may change (`config.resume_checks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sweeps.checkpoint_locations import trial_store
from sweeps.config.provenance_check import Origin, check_origin
from sweeps.config.resume_checks import check_search_changes
from sweeps.config.revisions import describe_changes
from sweeps.config.searched_workers import does_not_fit
from sweeps.config.spec import SweepSpec
from sweeps.errors import OriginChanged, SpecError
from sweeps.ledger.confirm_request import ConfirmRequest
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import TrialRecord, of_search
from sweeps.paths import SweepPaths
from sweeps.policies.confirmation import check_unchanged, make_request
from sweeps.reconciliation.extra_training import ExtraTraining
from sweeps.reconciliation.finishing import check_free, check_unfinished, trials_to_finish
from sweeps.reconciliation.retrying import Retry, describe_retries, plan_retry, trials_to_retry
from trainable.fingerprint import BUILT


@dataclass(frozen=True)
class PlannedExtra:
    """What is trained besides the search, after the checks."""

    retries: Sequence[Retry] = ()
    finish: Sequence[int] = ()
    confirm: ConfirmRequest | None = None

    def describe(self, spec: SweepSpec) -> str:
        """Return what was asked for, in one line; empty for nothing."""
        leaders = () if self.confirm is None else self.confirm.leaders
        notes = [describe_retries(self.retries, spec)]
        for verb, numbers in (("finish", self.finish), ("confirm", leaders)):
            if numbers:
                notes.append(f"{verb} {', '.join(f'trial {number}' for number in numbers)}")
        return "; ".join(filter(None, notes))


def plan_resume(
    paths: SweepPaths,
    before: SweepSpec,
    spec: SweepSpec,
    origin: Origin,
    ledger: Ledger,
    extra: ExtraTraining,
    *,
    accepted: bool,
    max_workers: int | None,
) -> PlannedExtra:
    """Check that a sweep can resume with a spec, and return what it trains besides the search.

    Arguments and errors are those of `session.open_ledger`. After accepted changes it removes what
    trials have noted of their task as it was built, once all checks have passed.
    """
    trials = ledger.trials()
    retry, again = extra.retry, list[int]()
    if retry is not None:
        again = trials_to_retry(paths, spec, trials, retry, ledger.seconds)
    fresh = retry is not None and retry.fresh
    # Without a trained trial there is nothing to compare with.
    others = [one for one in trials if not (fresh and one.number in again)]
    accepted = accepted or not _has_trained(paths, before, others)
    check_origin(ledger.origin, origin, before, spec, accepted=accepted)
    if not accepted:
        _check_reported_trials(paths, before, spec, trials)
        # A retried trial that finishes a pruned one must continue it exactly, too.
        running = [replace(t, state="running") if t.number in again else t for t in trials]
        check_unfinished(paths, spec, running)
        check_unchanged(paths, spec, ledger.confirm_request, trials)
    check_search_changes(before, spec, len(of_search(trials)))
    finish = trials_to_finish(paths, spec, trials, extra.finish)
    num_new, request = len(finish), None
    if extra.confirm is not None:
        request = make_request(paths, spec, trials, ledger.confirm_request, extra.confirm)
        num_new += len(request.leaders) * request.seeds
    for index in range(num_new):
        check_free(paths, len(trials) + index)
    origins = (ledger.origin, origin)
    retries = [
        plan_retry(paths, spec, trials[number], fresh=fresh, origins=origins) for number in again
    ]
    planned = PlannedExtra(retries, finish, request)
    if max_workers is not None:
        _check_workers(paths, spec, trials, planned, max_workers)
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
    """Refuse to resume where a trial would wait for ever, because it has too many workers.

    New trials of the search fit: the spec was checked.

    Raises:
        SpecError: The message names each such trial.
    """
    leaders = () if planned.confirm is None else planned.confirm.leaders
    trained = {*(one.number for one in planned.retries), *planned.finish, *leaders}
    issues = [
        does_not_fit(
            trial.number,
            workers,
            most,
            "resume the sweep where they do, or end the trial with: "
            + paths.command("stop", "--trial", str(trial.number)),
        )
        for trial in trials
        if not trial.finished or trial.number in trained
        if (workers := spec.workers_of(trial.params)) > most
    ]
    if issues:
        raise SpecError(issues)


def _has_trained(paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialRecord]) -> bool:
    """Whether a trial has reported, or resumes from a checkpoint.

    Checkpoint stores are queried last and one by one, because an object store is slow and charges
    for each request. Trials without attempts are included: a driver that died right after a
    trial's start may not have counted the attempt.
    """
    unfinished = sorted((one for one in trials if not one.finished), key=lambda one: -one.attempts)
    return any(trial.reports for trial in trials) or any(
        trial_store(paths, spec, trial.number).generations() for trial in unfinished
    )


def _check_reported_trials(
    paths: SweepPaths, before: SweepSpec, after: SweepSpec, trials: Sequence[TrialRecord]
) -> None:
    """Refuse a configuration change if a trial would train again what it has reported.

    Raises:
        OriginChanged: A trial has made reports that it has not saved; the error names the
            first such trial.
    """
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
