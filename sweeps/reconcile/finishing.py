"""Train an ended trial on, by a new trial that continues from its checkpoints.

A pruned trial is trained to its end, a complete one to the end of a longer budget: from its newest
checkpoint up to which a longer run would have trained alike, such as the one before `wsd` decays.
Optuna never changes an ended trial, and the sampler learned how it ended. So the new one has
its parameters, its seed, and copies of its curve and checkpoints; it is exempt from early
stopping. The ledger stores the trial first, then its directory appears by a rename, if need be by
the next driver. What must not live here: training, and what such a trial means
(`ledger.trials.of_search`).
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sweeps.errors import OriginChanged, SpecError, UserError
from sweeps.formatting import counted
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SCRATCH, TRIAL_CONFIG, SweepPaths
from sweeps.reconcile.extra_training import (
    ExtraTraining,
    NewTrial,
    PlannedExtra,
    SweepTrials,
    add_trials,
)
from sweeps.recording.trial_config import read_config
from sweeps.spec.resume_checks import Origin
from sweeps.spec.revisions import changes
from sweeps.spec.spec import SweepSpec
from sweeps.stores import address_of, trial_files, trial_store
from trainable.checkpoint import Generation, check_owner
from trainable.config import TrialConfig
from trainable.processes.trial_log import RANK_LOGS, TRIAL_LOG
from trainable.schedule import steps_of_any_length
from trainable.store.metrics_file import drop_later_rows
from trainable.store.notes import TESTED
from trainable.store.objects import files_of
from trainable.store.regular_files import make_directory, sync_directory, sync_file
from trainable.warm_start import copy_generations

_NOT_COPIED = {TRIAL_CONFIG, TRIAL_LOG, TESTED, "checkpoints", "figures", "inherited"}
"""What a trial's directory has for this trial alone; checkpoints are copied one by one."""
_NOT_OF_TRAINING = "checkpoint."
"""The section of a trial's configuration that may change without changing the training."""


@dataclass(frozen=True)
class FinishTrials(ExtraTraining):
    """Train pruned trials to their end, and complete ones longer; each gets a new trial."""

    numbers: Sequence[int] = ()

    def choose(self, sweep: SweepTrials) -> list[int]:
        """Return which of the trials need a new trial."""
        return trials_to_finish(sweep.paths, sweep.spec, sweep.trials, self.numbers)

    def plan(
        self, sweep: SweepTrials, chosen: Sequence[int], origins: tuple[Origin, Origin]
    ) -> PlannedExtra:
        """Return the new trials; their directories are made later, by `make_directories`."""
        del sweep, origins
        new = [NewTrial("finish", number) for number in chosen]
        note = f"finish {', '.join(f'trial {number}' for number in chosen)}" if chosen else ""
        return PlannedExtra(
            lambda ledger: add_trials(ledger, new), note, trains=chosen, num_new=len(new)
        )


def finishing_trial(number: int, trials: Iterable[TrialSummary]) -> TrialSummary | None:
    """Return the trial that finishes a pruned trial, unless it was stopped or failed itself."""
    found = [t for t in trials if t.finishes == number and t.state not in ("pruned", "failed")]
    return found[-1] if found else None


def can_offer_finish(
    spec: SweepSpec, record: TrialSummary, trials: Iterable[TrialSummary]
) -> bool:
    """Return whether messages offer to train a trial to its end."""
    return (
        record.state == "pruned"
        and record.finishes is None
        and spec.repeats.seeds == 1
        and not spec.early_stopping.rule.is_population
        and not spec.is_of_script
        and finishing_trial(record.number, trials) is None
    )


def trials_to_finish(
    paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialSummary], numbers: Iterable[int]
) -> list[int]:
    """Return which of the named trials need a new trial to finish them.

    The others are finished already, or are being finished: asking twice trains once.
    """
    wanted = sorted(set(numbers))
    for number in wanted:
        if fault := _fault(paths, spec, trials, number):
            raise UserError(f"--finish: {fault}")

    def needs_trial(number: int) -> bool:
        last = finishing_trial(number, trials)
        if last is None or trials[number].state == "pruned" or not last.finished:
            return last is None
        config = read_config(paths.trial(last.number) / TRIAL_CONFIG)
        return config.budget.reports < spec.budget.reports

    return [number for number in wanted if needs_trial(number)]


def check_unfinished(paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialSummary]) -> None:
    """Check that no change of the spec affects a trial that finishes another one."""
    for trial in trials:
        if trial.finishes is None or trial.finished:
            continue
        try:
            was = read_config(paths.trial(trial.finishes) / TRIAL_CONFIG)
        except (OSError, ValueError):
            continue  # lost since; the trial resumes as every other one does
        if fault := _fault_of_config(was, spec, trials[trial.finishes]):
            stop = paths.command("stop", str(trial.number))
            raise OriginChanged(
                f"trial {trial.number} finishes trial {trial.finishes}: {fault}; or end the new "
                f"trial with: {stop}; or resume with --accept-changes"
            )


def check_free(paths: SweepPaths, number: int) -> None:
    """Check that the directory of a new trial does not exist."""
    directory = paths.trial(number)
    if os.path.lexists(directory):
        raise UserError(
            f"{directory} belongs to no trial of the ledger, and a new trial would take it for "
            "its own; trials start in directories of their own; move it away"
        )


def make_directories(paths: SweepPaths, spec: SweepSpec, trials: Iterable[TrialSummary]) -> None:
    """Make the missing directories of trials that train others on; the caller has the lock."""
    records = list(trials)
    for trial in records:
        if trial.finishes is None or trial.finished or paths.trial(trial.number).is_dir():
            continue
        _make_directory(paths, spec, trial.number, records[trial.finishes])


def _make_directory(paths: SweepPaths, spec: SweepSpec, number: int, ended: TrialSummary) -> None:
    source, target = paths.trial(ended.number), paths.trial(number)
    last = _shared_checkpoint(paths, spec, ended) if ended.state == "complete" else None
    with tempfile.TemporaryDirectory(dir=paths.directory, prefix=SCRATCH) as scratch:
        made = Path(scratch, target.name)
        made.mkdir()
        # In an object store, the copies have the new trial's address from the start.
        copy_generations(
            trial_files(paths, spec, ended.number),
            files_of(made, address_of(paths, spec, number)),
            up_to=None if last is None else last.number,
        )
        shutil.copytree(
            source, made, symlinks=True, ignore=partial(_left_out, source), dirs_exist_ok=True
        )
        if last is not None:
            drop_later_rows(made, last.step)
        for path in made.rglob("*"):
            if path.is_file() and not path.is_symlink():
                sync_file(path)
        make_directory(target.parent)
        sync_directory(made)
        made.rename(target)
        sync_directory(target.parent)


def _left_out(trial: Path, directory: str, names: list[str]) -> set[str]:
    """Return the names in a directory of a pruned trial that the new trial does not get."""
    # The rest is copied, because a custom loop may keep files of its own there.
    found = {name for name in names if not _is_plain(Path(directory, name))}
    found |= set(fnmatch.filter(names, RANK_LOGS))
    return found | _NOT_COPIED if Path(directory) == trial else found


def _is_plain(path: Path) -> bool:
    return path.is_symlink() or path.is_file() or path.is_dir()


def _fault(
    paths: SweepPaths, spec: SweepSpec, trials: Sequence[TrialSummary], number: int
) -> str | None:
    """Return why a trial cannot be finished; None if it can."""
    if not 0 <= number < len(trials):
        known = f"its trials are 0 to {len(trials) - 1}" if trials else "it has no trials yet"
        return f"sweep '{paths.name}' has no trial {number}; {known}"
    trial, see = trials[number], paths.command("trials", "--state", "pruned")
    if not trial.finished:
        return (
            f"trial {number} has not ended; --finish takes a pruned trial; train it on with: "
            f"{paths.command('resume')}"
        )
    if trial.state == "failed":
        return (
            f"trial {number} failed ({trial.reason}); --finish takes a pruned trial; these are: "
            f"{see}"
        )
    if trial.finishes is not None:
        return (
            f"trial {number} itself finishes trial {trial.finishes}; --finish takes a trial that "
            f"the search suggested; write {trial.finishes}"
        )
    if spec.repeats.seeds > 1:
        word = spec.repeats.word
        return (
            f"trial {number} is one of up to {spec.repeats.seeds} {word}s of its configuration, "
            f"which counts only with all of them; a single {word} is not finished; use its best "
            f"checkpoint: {paths.command('best', str(number))}"
        )
    if spec.early_stopping.rule.is_population:
        return (
            f"trial {number} is a member of a population ({spec.early_stopping.scheduler}), whose "
            "members train together; a single member cannot be finished; use its best checkpoint: "
            f"{paths.command('best', str(number))}"
        )
    return _fault_of_files(paths, spec, trial)


def _fault_of_files(paths: SweepPaths, spec: SweepSpec, trial: TrialSummary) -> str | None:
    """Return why the configuration or the checkpoints of a pruned trial do not allow it."""
    file = paths.trial(trial.number) / TRIAL_CONFIG
    try:
        was = read_config(file)
    except (OSError, ValueError) as error:
        return (
            f"{file} cannot be read ({error}); only the same configuration continues a trial "
            "exactly; restore the file from a backup"
        )
    if fault := _fault_of_config(was, spec, trial):
        return fault
    if trial.state == "complete":
        return _fault_of_length(paths, was, spec, trial)
    if not trial_store(paths, spec, trial.number).generations():
        where = trial_files(paths, spec, trial.number).address("")
        return (
            f"there is no valid checkpoint at {where}; a trial is finished from its newest "
            "checkpoint; restore it from a backup"
        )
    check_owner(trial_files(paths, spec, trial.number).address(""))
    return None


def _fault_of_length(
    paths: SweepPaths, was: TrialConfig, spec: SweepSpec, trial: TrialSummary
) -> str | None:
    """Return why a complete trial cannot be trained longer; None if it can."""
    number, had = trial.number, was.budget.reports
    if spec.budget.reports <= had:
        word = spec.budget.report_word
        longer = f"budget.epochs={2 * had}" if word == "epoch" else "budget.KEY=VALUE"
        return (
            f"trial {number} is complete, and the budget is not longer than its "
            f"{counted(had, word)}; --finish takes a pruned trial, or with a longer budget a "
            f"complete one; lengthen it with -s {longer}"
        )
    if _shared_checkpoint(paths, spec, trial) is None:
        return (
            f"trial {number} is complete, and no checkpoint of it is one of a longer run: its "
            f"schedule {was.train.schedule.name} depends on the length of the run from the start, "
            "or its warmup or average starts at a fraction of it; start a new sweep with the "
            "longer budget, and with wsd or constant and the warmup in steps"
        )
    check_owner(trial_files(paths, spec, number).address(""))
    return None


def _shared_checkpoint(
    paths: SweepPaths, spec: SweepSpec, trial: TrialSummary
) -> Generation | None:
    """Return the newest checkpoint of a complete trial that a longer run would have, too."""
    train = read_config(paths.trial(trial.number) / TRIAL_CONFIG).train
    generations = trial_store(paths, spec, trial.number).generations()
    last = steps_of_any_length(train, generations[-1].step) if generations else 0
    return next((one for one in reversed(generations) if 0 < one.step <= last), None)


def _fault_of_config(was: TrialConfig, spec: SweepSpec, trial: TrialSummary) -> str | None:
    """Return how the configuration of an ended trial would differ; None if it is the same.

    That of a complete trial may have another budget.
    """
    try:
        now = spec.trial_config(trial.seed, trial.params)
    except SpecError as error:
        return (
            f"the sweep's spec has changed, and no longer takes the parameters of trial "
            f"{trial.number}: {error}; change it back with -s KEY=VALUE"
        )
    found = changes(was, now)
    free = [_NOT_OF_TRAINING, *["budget."] * (trial.state == "complete")]
    differing = [key for key in found if not key.startswith(tuple(free))]
    if not differing:
        return None
    each = ", ".join(f"{key}: {found[key][0]} -> {found[key][1]}" for key in differing)
    return (
        f"the sweep's spec has changed since trial {trial.number} was trained ({each}); only "
        "the same configuration continues a trial exactly; change it back with -s KEY=VALUE"
    )
