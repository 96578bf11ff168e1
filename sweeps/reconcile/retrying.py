"""Run failed trials again, as new attempts with their own numbers and parameters.

`sweep resume --retry` reopens them in one transaction of the ledger, which makes them unfinished,
deletes reports after the checkpoint from which they continue, and stores what else is to be done:
removing figures, with `--fresh` all files, and a run with points of steps that are trained again.
If the driver dies there, the next one does that again. What must not live here: training, and the
transaction (`ledger`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sweeps.errors import SpecError, UserError
from sweeps.ledger.failed_attempts import FailedAttempt, Reopened
from sweeps.ledger.reasons import kind_of
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SCRATCH, TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.extra_training import ExtraTraining, PlannedExtra, SweepTrials
from sweeps.reconcile.stop_criteria import active_stop_criterion
from sweeps.recording.trial_config import read_config
from sweeps.spec.resume_checks import Origin, code_changes
from sweeps.spec.revisions import changes
from sweeps.spec.spec import SweepSpec
from sweeps.stores import address_of, trial_files, trial_store
from tracking.limits import clean_key
from tracking.outbox import Outbox
from tracking.outbox_status import DeliveryStatus, read_outbox
from trainable.errors import AllCheckpointsDamaged
from trainable.store.metrics_file import read_logged, read_rows
from trainable.store.regular_files import sync_directory

if TYPE_CHECKING:  # it imports optuna, which takes half a second
    from sweeps.ledger.ledger import Ledger

_DIVERGED = "non_finite"
_FIGURES = "figures"
_LONGEST_CHANGES = 1_000
_BEFORE_ANY_STEP = -1


@dataclass(frozen=True)
class RetryRequest(ExtraTraining):
    """Run failed trials again."""

    trials: tuple[int, ...] = ()
    """Their numbers; empty: all that failed."""
    fresh: bool = False
    """From step 0, not from their newest checkpoints."""
    reopens: ClassVar[bool] = True

    @property
    def starts_over(self) -> bool:
        """Whether they start at step 0."""
        return self.fresh

    def choose(self, sweep: SweepTrials) -> list[int]:
        """Return which trials are to be reopened; those that are reopened already continue."""
        paths, spec, trials = sweep.paths, sweep.spec, sweep.trials
        wanted = sorted(set(self.trials)) or [t.number for t in trials if t.state == "failed"]
        for number in wanted:
            if fault := _fault(paths, spec, trials, number, fresh=self.fresh):
                raise UserError(f"trial {number} is not run again: {fault}")
        chosen = [number for number in wanted if trials[number].state == "failed"]
        if not chosen and not any(_is_reopened(trial) for trial in trials):
            see = paths.command("trials")
            raise UserError(
                f"sweep '{paths.name}' has no failed trial; --retry takes failed trials; its "
                f"trials: {see}"
            )
        opened = [replace(t, state="running") if t.number in chosen else t for t in trials]
        stop = active_stop_criterion(spec, opened, sweep.seconds) if chosen else None
        if stop is not None and any(trials[n].role in ("search", "repeat") for n in chosen):
            more = [word for change in stop.continue_overrides for word in ("-s", change)]
            raise UserError(
                f"{stop.key} ended the sweep ({stop.why}), and would end a trial that is run "
                f"again at once; change it with: {paths.command('resume', '--retry', *more)}"
            )
        return chosen

    def plan(
        self, sweep: SweepTrials, chosen: Sequence[int], origins: tuple[Origin, Origin]
    ) -> PlannedExtra:
        """Return how each trial is reopened; what is left to do then, `complete_retries` does."""
        paths, spec = sweep.paths, sweep.spec
        retries = [
            plan_retry(paths, spec, sweep.trials[number], fresh=self.fresh, origins=origins)
            for number in chosen
        ]
        if not retries:
            return PlannedExtra()

        def store(ledger: Ledger) -> None:
            ledger.store_origin(origins[1])
            for one in retries:
                ledger.reopen(one.number, one.attempt, one.reopened, steps=one.steps)

        note = describe_retries(retries, spec)
        cautions = filter(None, (one.caution(paths) for one in retries))
        return PlannedExtra(
            lambda ledger: ledger.transaction(lambda: store(ledger)),
            note,
            warnings=[note, *cautions],
            trains=chosen,
            stores_origin=True,  # after a kill, the retry still knows how the code has changed
        )


@dataclass(frozen=True)
class Retry:
    """How one failed trial is run again."""

    number: int
    attempt: FailedAttempt
    reopened: Reopened
    steps: Mapping[int, int]
    """The optimizer steps of the reports that it keeps, by epoch."""

    def caution(self, paths: SweepPaths) -> str | None:
        """Return why the retry may fail like the attempt before; None: nothing speaks for it."""
        at = self.attempt.continued_at
        if kind_of(self.attempt.reason) != _DIVERGED:
            return None
        if not self.attempt.changes:
            return (
                f"trial {self.number} diverged, and neither its code nor its configuration has "
                "changed since: it trains the same steps and diverges again; change the code, or "
                "a key with -s KEY=VALUE"
            )
        if not at:
            return None
        fresh = paths.command("resume", str(self.number), "--retry", "--fresh")
        return (
            f"trial {self.number} diverged after report {at}, from whose checkpoint it continues; "
            "if its weights were too large by then, it diverges again; if it does, start it from "
            f"step 0 with: {fresh}"
        )


def plan_retry(
    paths: SweepPaths,
    spec: SweepSpec,
    record: TrialSummary,
    *,
    fresh: bool,
    origins: tuple[Origin, Origin] = (Origin(), Origin()),
) -> Retry:
    """Find out from which checkpoint a failed trial continues, and what does not fit to it."""
    number, directory = record.number, paths.trial(record.number)
    epoch, step = (0, _BEFORE_ANY_STEP) if fresh else _newest(paths, spec, record)
    word, metrics = spec.budget.report_word, {spec.budget.report_word, *spec.metrics}
    rows = read_rows(directory) if epoch else []
    steps = {
        int(row.metrics[word]): row.step
        for row in rows
        if row.step <= step and row.metrics.keys() >= metrics
    }
    attempt = FailedAttempt(
        max(record.attempts, 1),  # a configuration may be refused before the first one
        record.reason or "",
        record.epoch,
        record.ended_ms,
        epoch,
        _changes(paths, spec, record, *origins),
    )
    replaces = _has_later_points(read_outbox(paths.outbox, number), number, directory, step)
    return Retry(number, attempt, Reopened(fresh, replaces), steps)


def describe_retries(retries: Sequence[Retry], spec: SweepSpec) -> str:
    """Return which trials run again, and from where, in one line."""
    word = spec.budget.report_word
    each = (
        f"trial {one.number} from "
        + (f"{word} {one.attempt.continued_at}" if one.attempt.continued_at else "step 0")
        for one in retries
    )
    return f"retry {', '.join(each)}"


def complete_retries(paths: SweepPaths, spec: SweepSpec, ledger: Ledger) -> None:
    """Do what is still to be done for reopened trials; the caller has the lock."""
    for trial in ledger.trials():
        if trial.reopened is None or trial.finished:
            continue
        with closing(Outbox(paths.outbox)) as outbox:
            if trial.reopened.replaces_run:
                outbox.replace_run(trial.number)
            else:
                outbox.limit_log(trial.number, trial.step)
        if trial.reopened.fresh:
            _remove_files(paths, spec, trial.number)
        else:
            _remove(paths.trial(trial.number) / _FIGURES, paths)
        ledger.store_reopened(trial.number)


def _is_reopened(trial: TrialSummary) -> bool:
    return bool(trial.failed_attempts) and not trial.finished


def _fault(
    paths: SweepPaths,
    spec: SweepSpec,
    trials: Sequence[TrialSummary],
    number: int,
    *,
    fresh: bool,
) -> str | None:
    """Return why a trial cannot be run again; None if it can, or if it has been reopened."""
    if not 0 <= number < len(trials):
        known = f"its trials are 0 to {len(trials) - 1}" if trials else "it has no trials yet"
        return f"sweep '{paths.name}' has no such trial; {known}"
    trial = trials[number]
    if _is_reopened(trial):
        if fresh and trial.failed_attempts[-1].continued_at:
            return (
                "it is being run again from a checkpoint and has not ended; --fresh takes a trial "
                f"that has failed; continue it with: {paths.command('resume')}"
            )
        return None
    match trial.state:
        case "complete":
            return (
                "it is complete; --retry takes failed trials; train it once more, beside the "
                f"sweep, with: {paths.command('train', str(number))}"
            )
        case "pruned":
            return (
                "it was stopped; --retry takes failed trials; train it to its end with: "
                f"{paths.command('resume', str(number), '--finish')}"
            )
        case "failed":
            if spec.early_stopping.rule.is_population:
                return (
                    f"it is a member of a population ({spec.early_stopping.scheduler}), whose "
                    "members train together; start a new sweep with: sweep run FILE --name NAME"
                )
            if fresh and trial.finishes is not None:
                return (
                    f"it continues trial {trial.finishes}, whose checkpoints it began with, and "
                    "--fresh would begin at step 0; leave --fresh out, or train the configuration "
                    f"anew, beside the sweep, with: {paths.command('train', str(number))}"
                )
            return None
    return f"it has not failed; it continues with: {paths.command('resume')}"


def _newest(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> tuple[int, int]:
    """Return epoch and step of the checkpoint from which a trial continues."""
    fresh = paths.command("resume", str(record.number), "--retry", "--fresh")
    store = trial_store(paths, spec, record.number)
    try:
        newest = store.newest()
    except AllCheckpointsDamaged as error:
        raise UserError(
            f"trial {record.number} is not run again: {error}; or start it from step 0 with: "
            f"{fresh}"
        ) from None
    if newest is None:
        return 0, _BEFORE_ANY_STEP
    if newest.epoch >= spec.budget.reports:
        raise UserError(
            f"trial {record.number} is not run again: it failed after its last "
            f"{spec.budget.report_word} ({record.reason}), and its newest checkpoint has nothing "
            f"left to train; start it from step 0 with: {fresh}"
        )
    return newest.epoch, newest.step


def _changes(
    paths: SweepPaths, spec: SweepSpec, record: TrialSummary, before: Origin, now: Origin
) -> str:
    """Return what has changed of a trial's code and configuration since it was trained."""
    found = list(code_changes(before, now))
    try:
        was = read_config(paths.trial(record.number) / TRIAL_CONFIG)
        differing = changes(was, spec.trial_config(record.seed, record.params))
    except (OSError, ValueError, SpecError):  # it never began, or fails again before it trains
        differing = {}
    found += [f"{key}: {old} -> {new}" for key, (old, new) in differing.items()]
    text = "; ".join(found)
    return text if len(text) <= _LONGEST_CHANGES else text[: _LONGEST_CHANGES - 1] + "…"


def _has_later_points(delivered: DeliveryStatus, number: int, directory: Path, step: int) -> bool:
    """Return whether tracking has, or may have, points of a trial at later steps than `step`."""
    if delivered.damage is not None:
        return True
    marks = delivered.marks.get(number)
    if marks is None:
        return False
    own_steps: dict[str, int] = {}
    for at, row in read_logged(directory):
        for name in row.metrics:
            key = clean_key(name)
            last = row.step if at <= step else _BEFORE_ANY_STEP
            own_steps[key] = max(last, own_steps.get(key, _BEFORE_ANY_STEP))
    return not marks.are_complete or any(
        mark > own_steps.get(key, step) for key, mark in marks.steps.items()
    )


def _remove_files(paths: SweepPaths, spec: SweepSpec, number: int) -> None:
    """Remove a trial's checkpoints and its directory; a worker that is still alive is fenced."""
    if address_of(paths, spec, number) is not None:
        files = trial_files(paths, spec, number)
        files.open()
        for name in files.names():
            files.remove(name)
        files.close()
    _remove(paths.trial(number), paths)


def _remove(path: Path, paths: SweepPaths) -> None:
    """Remove a file or directory; it disappears at once."""
    if not os.path.lexists(path):
        return
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=SCRATCH) as scratch:
        path.rename(Path(scratch, path.name))
        sync_directory(path.parent)
