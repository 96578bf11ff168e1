"""Train a trial again in a directory of its own, and compare curve and states bit for bit.

It has the trial's seeds, threads and configurations, and ends where the trial's curve ends; states
are compared at the steps of the trial's checkpoints. The sweep is only read. What must not live
here: the comparison of two states (`check.compare_states`), and printing.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.engine.provenance import provenance
from sweeps.engine.task_check import check_names
from sweeps.errors import UserError
from sweeps.formatting import quoted
from sweeps.ledger.trials import TrialSummary
from sweeps.path_checks import make_private
from sweeps.paths import TRIAL_CONFIG
from sweeps.recording.trial_config import read_config
from sweeps.run.task_code import as_a_trial, changed_code, enter_code_directory
from sweeps.spec.revisions import read_revisions
from sweeps.spec.trial_run import num_threads, with_accumulation
from sweeps.stores import trial_files, trial_store
from sweeps.view.sweep_view import SweepView
from trainable.checkpoint import CheckpointStore, Generation, check_owner
from trainable.config import TrialConfig
from trainable.errors import CheckpointError, TrainingCaution, TrainingError
from trainable.processes.local_ranks import local_ranks
from trainable.processes.trial_log import RANK_LOGS, TRIAL_LOG
from trainable.store.local import LocalFiles
from trainable.store.manifest import best_first, read_manifest
from trainable.store.metrics_file import Row, read_logged, read_rows
from trainable.store.notes import TESTED, read_earlier
from trainable.store.regular_files import LARGEST_TEXT, read_regular
from trainable.user_code.fingerprint import BUILT

_NOT_COPIED = shutil.ignore_patterns(TRIAL_LOG, RANK_LOGS, TESTED, "checkpoints", "figures", ".*")
FIRST, LATEST, BEST = "first", "latest", "best"


@dataclass(frozen=True)
class _Kept:
    """What a trial has left."""

    rows: Sequence[Row]
    generations: Sequence[Generation]
    store: CheckpointStore
    damaged: Sequence[str]
    """Why checkpoints cannot be used, in sentences."""

    @property
    def end(self) -> int:
        """The last step of which there is a row or a checkpoint."""
        steps = [row.step for row in self.rows[-1:]]
        return max([*steps, *(one.step for one in self.generations)], default=0)


def reproduce(
    view: SweepView,
    number: int | None,
    *,
    start: str | None = None,
    directory: Path | None = None,
    ignored: Collection[str] = (),
    doing: Callable[[str], object] = lambda _: None,
) -> Reproduction:
    """Train a trial again, and compare it with what the trial left."""
    record = view.select_trial(None) if number is None else view.record(number)
    if not record.finished and view.running:
        raise UserError(
            f"trial {record.number} is being trained, and its files change; a trial is compared "
            "once it has ended; wait until then"
        )
    check_single(view, record)
    start_directory = enter_code_directory(view, doing)
    directory = directory and start_directory / directory
    check_names(view.spec)
    kept, parts = _kept(view, record), stages(view, record)
    begin = None if start is None else _start(kept, start, record, view)
    begun = 0 if begin is None else begin.step
    _check_ignored(kept, record, ignored)
    _check_something_left(kept, record, begun, view)
    with ExitStack() as stack:
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="sweep-reproduce-")
            directory = Path(stack.enter_context(made))
        else:
            _check_empty(directory, view)
            directory = stack.enter_context(make_private(directory, "--dir"))
        if begin is not None:
            _copy_start(view, record, begin, directory)
        # A task may print, and standard output is for the result.
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(as_a_trial(view.spec))
        machine = [*_machine(view)]  # before torch is set up, which changes the environment
        run = _Run(view, record, kept, directory, [*_measured(), *ignored], begun, doing)
        found = run.train([part for part in parts if part.until is None or part.until > begun])
        lost = lost_stage(record, parts)
        notes = [*found.notes, *([lost] if lost else [])]
        return replace(found, notes=notes, machine=machine)


def _check_ignored(kept: _Kept, record: TrialSummary, ignored: Collection[str]) -> None:
    known = {key for row in kept.rows for key in row.metrics}
    for metric in ignored:
        if known and metric not in known:
            raise UserError(
                f"--ignore {quoted(metric)}: trial {record.number} has no such metric; its "
                f"metrics are {', '.join(sorted(known))}; name one of these, or leave it out"
            )


def _measured() -> Collection[str]:
    from trainable.watch.diagnostics import MEASURED  # which imports torch

    return MEASURED


def _kept(view: SweepView, record: TrialSummary) -> _Kept:
    store = trial_store(view.paths, view.spec, record.number)
    files = trial_files(view.paths, view.spec, record.number)
    read = [read_manifest(files, name) for name in files.names()]
    damaged = [f"a checkpoint is damaged: {one}" for one in read if isinstance(one, str)]
    rows = read_rows(view.paths.trial(record.number))
    return _Kept(rows, store.generations(), store, damaged)


def _start(kept: _Kept, start: str, record: TrialSummary, view: SweepView) -> Generation:
    """Return the checkpoint from which the new run starts."""
    saved, word = kept.generations, view.spec.budget.report_word
    found: Generation | None = None
    if start in (FIRST, LATEST):
        found = min(
            saved, key=lambda one: one.number * (1 if start == FIRST else -1), default=None
        )
    elif start == BEST:
        rated = [one for one in saved if one.value is not None]
        found = min(rated, key=best_first, default=None)
    elif start.isdecimal():
        found = next((one for one in reversed(saved) if one.epoch == int(start)), None)
    else:
        raise UserError(
            f"--from {start}: it must be {FIRST}, {LATEST}, {BEST} or the {word} after which a "
            "checkpoint was saved, such as 3"
        )
    if found is None:
        there = ", ".join(str(one.epoch) for one in saved)
        has = f"its checkpoints are of {word} {there}" if there else "it has no checkpoint"
        raise UserError(
            f"--from {start}: trial {record.number} has no such checkpoint; {has}; name one of "
            "these, or leave --from out to start at the beginning"
        )
    if not kept.store.is_sound(found):
        verify = view.paths.command("audit", "--files")
        raise UserError(
            f"--from {start}: {found.address} is damaged, and a run starts at a sound checkpoint; "
            f"choose another one; see what is damaged with: {verify}"
        )
    check_owner(found.address)
    return found


def _check_something_left(kept: _Kept, record: TrialSummary, begun: int, view: SweepView) -> None:
    if not kept.end:
        see = view.paths.command("show", str(record.number))
        raise UserError(
            f"trial {record.number} has neither a curve nor a checkpoint to compare with; see: "
            f"{see}"
        )
    if kept.end <= begun:
        raise UserError(
            f"trial {record.number} ended at step {kept.end}, and the checkpoint is of step "
            f"{begun}: nothing is left to train; start at an earlier checkpoint, or leave --from "
            "out to start at the beginning"
        )


def _check_empty(directory: Path, view: SweepView) -> None:
    """Refuse a directory that has files, or lies in the sweep's own."""
    place = Path(os.path.realpath(directory))
    if place.is_relative_to(os.path.realpath(view.paths.directory)):
        raise UserError(
            f"--dir {directory} lies in the directory of the sweep, which is only read; choose "
            "another one"
        )
    if (place / BUILT).is_file():
        raise UserError(
            f"--dir {directory} holds the files of a run, such as a reproduction that was ended; "
            "a trial is trained again from its beginning; choose another directory, or repeat the "
            f"command after: rm -r {shlex.quote(str(place))}"
        )
    if place.is_dir() and any(place.iterdir()):
        raise UserError(
            f"--dir {directory} is not empty; a trial is trained again in a new directory; choose "
            "another one, or remove it"
        )


def _copy_start(
    view: SweepView, record: TrialSummary, generation: Generation, directory: Path
) -> None:
    """Copy the trial's files and one checkpoint, so that the new run resumes from it."""
    source = view.paths.trial(record.number)
    shutil.copytree(source, directory, symlinks=True, ignore=_NOT_COPIED, dirs_exist_ok=True)
    (directory / BUILT).unlink(missing_ok=True)  # the new run writes its own, to be compared
    files = trial_files(view.paths, view.spec, record.number)
    target = Path(LocalFiles.of(directory).address(generation.name))
    target.mkdir(parents=True)
    for name in generation.files:
        (target / name).write_bytes(files.read(generation.name, name))


@dataclass
class _Run:
    """The new run."""

    view: SweepView
    record: TrialSummary
    kept: _Kept
    directory: Path
    ignored: Collection[str]
    begun: int
    doing: Callable[[str], object]
    reached: int = 0
    failure: str | None = None

    def train(self, parts: Sequence[Stage]) -> Reproduction:
        """Train all parts, and compare."""
        spec = self.view.spec
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads(spec.resources.cpu)))
        watch = _StateWatch(self.kept, self.begun, self.ignored)
        for part in parts:
            self._train_part(part, watch)
            if self.failure is not None:
                break
        return self._compare(watch)

    def _train_part(self, part: Stage, watch: _StateWatch) -> None:
        from trainable.build import open_trainer
        from trainable.logged import close_run, run_log

        spec, end = self.view.spec, self.kept.end if part.until is None else part.until
        word = spec.budget.report_word
        run_log(self.directory)  # as in a worker: the task may log in its constructor
        shared: dict[str, Any] = {
            "device": "cpu" if spec.resources.gpu == 0 else None,
            "threads": num_threads(spec.resources.cpu),
            "searched": tuple(self.record.params),
            "accept_workers": True,  # a stage after a change of their number, as in the trial
        }
        with ExitStack() as stack:
            stack.callback(close_run, self.directory)
            ranks = stack.enter_context(local_ranks(part.config, self.directory, **shared))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TrainingCaution)
                trainer = open_trainer(
                    part.config,
                    self.directory,
                    ranks=ranks,
                    **shared,
                )
            stack.callback(trainer.close)
            trainer.store.observer, trainer.stop_at = watch, end
            try:
                if trainer.position < end:
                    for report in trainer.events():
                        self.doing(f"training: {word} {report.epoch}, step {report.step} of {end}")
            except TrainingError as error:
                self.failure = f"{type(error).__name__}: {error}"
            self.reached = trainer.position

    def _compare(self, watch: _StateWatch) -> Reproduction:
        self.doing("comparing")
        paths, number = self.view.paths, self.record.number
        source = paths.trial(number)
        rows = [row for row in self.kept.rows if row.step > self.begun]
        again = [row for row in read_rows(self.directory) if row.step > self.begun]
        curve = first_difference(rows, again, ignored=self.ignored)
        curve = curve or first_logged_difference(
            [one for one in read_logged(source) if one[0] > self.begun],
            [one for one in read_logged(self.directory) if one[0] > self.begun],
            until=self.reached,
        )
        ended = min((some[-1].step for some in (rows, again) if some), default=0)
        compared = [row for row in rows if row.step <= ended and again]
        return Reproduction(
            trial=number,
            started_from=self.begun,
            end=self.kept.end,
            reached=self.reached,
            num_rows=len(compared),
            num_metrics=len({key for row in compared for key in row.metrics} - {*self.ignored}),
            curve=curve,
            states=watch.checks(),
            not_compared=[*watch.not_compared(self.failure is not None)],
            notes=self._notes(),
            code=changed_code(self.view),
            built=_built_differences(source, self.directory),
            failure=self.failure,
        )

    def _notes(self) -> list[str]:
        if self.record.state != "failed":
            return []
        return [
            f"trial {self.record.number} failed after step {self.kept.end}: {self.record.reason}; "
            "the steps before are compared"
        ]


def _machine(view: SweepView) -> Iterator[MachineDifference]:
    """Yield what is different about this machine, before anything is trained."""
    yield from machine_differences(view.ledger.attempts, provenance())
    now = num_threads(view.spec.resources.cpu)
    then = {num_threads(one.resources.cpu) for one in read_revisions(view.paths.spec)}
    if then != {now}:
        yield MachineDifference("threads", ", ".join(map(str, sorted(then))), str(now))


def _built_differences(source: Path, directory: Path) -> list[str]:
    """Return what of the model and the data the task builds differently, in words."""
    from trainable.user_code.fingerprint import differences

    try:
        before, now = (
            json.loads(read_regular(place / BUILT, LARGEST_TEXT)) for place in (source, directory)
        )
        return differences(before, now)
    except (OSError, ValueError, AttributeError):  # a custom loop has none
        return []


class _StateWatch:
    """Compares the states of the new run with the trial's checkpoints, as it passes their steps.

    With fp16, several states may have the same step, of which one is that of the checkpoint.
    """

    def __init__(self, kept: _Kept, begun: int, ignored: Collection[str]) -> None:
        self._store, self._ignored = kept.store, ignored
        self._expected = [one for one in kept.generations if one.step > begun]
        self._checks: dict[str, StateCheck] = {}
        self._damaged = list(kept.damaged)
        self._has_states = False

    def wants(self, step: int) -> bool:
        """Whether a checkpoint of a step is still to be compared."""
        self._has_states = True
        return bool(self._of_step(step))

    def __call__(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        """Compare a state with the checkpoints of its step."""
        now = state()
        for generation in self._of_step(step):
            self._compare(generation, now)

    def _of_step(self, step: int) -> list[Generation]:
        checks = {name for name, check in self._checks.items() if check.is_equal}
        return [one for one in self._expected if one.step == step and one.name not in checks]

    def checks(self) -> list[StateCheck]:
        """Return the comparisons, in the order of steps."""
        return sorted(self._checks.values(), key=lambda one: (one.step, one.checkpoint))

    def not_compared(self, failed: bool) -> list[str]:
        """Return which checkpoints of the trial were not compared, and why, in sentences."""
        if not self._expected and self._has_states and not self._damaged:
            return ["the trial has no checkpoint after the start: no state was compared"]
        missing = [one for one in self._expected if one.name not in self._checks and not failed]
        return [
            *self._damaged,
            *(
                f"the new run had no state at step {one.step}, as {one.name} has"
                for one in missing
            ),
        ]

    def _compare(self, generation: Generation, now: dict[str, Any]) -> None:
        from trainable.check.compare_states import num_tensors, state_differences

        try:
            then = self._store.load(generation)
        except CheckpointError as error:
            self._damaged.append(str(error))
            self._expected = [one for one in self._expected if one is not generation]
            return
        found = [*state_differences(then, now, ignored=self._ignored)]
        first = found[0] if found else None
        self._checks[generation.name] = StateCheck(
            generation.name,
            generation.step,
            num_tensors(then),
            len(found),
            first and first.entry,
            first and first.what,
            first and first.largest,
        )


class Stage(NamedTuple):
    """A part of a trial with one configuration, until a step; None: until the trial's end."""

    config: TrialConfig
    until: int | None


def check_single(view: SweepView, record: TrialSummary) -> None:
    """Check that one run can train a trial."""
    if record.lineage:
        last = record.lineage[-1]
        raise UserError(
            f"trial {record.number} copied the weights of trial {last.donor} after "
            f"{view.spec.budget.report_word} {last.epoch}, as members of a population do; no "
            "single run trains it; train a trial that copied none, or use its checkpoint"
        )


def last_config(view: SweepView, record: TrialSummary) -> TrialConfig:
    """Return the configuration that a trial trained with last, or would start with."""
    try:
        config = read_config(view.paths.trial(record.number) / TRIAL_CONFIG)
    except FileNotFoundError:
        config = view.spec.trial_config(record.seed, record.params)
    except ValueError as error:
        raise UserError(
            f"the configuration of trial {record.number} cannot be read ({error}); only with the "
            "same configuration the training is the same; restore the file from a backup"
        ) from None
    return with_accumulation(config, record.accumulation)


def stages(view: SweepView, record: TrialSummary) -> list[Stage]:
    """Return the parts of a trial, one for each configuration that it had."""
    earlier = read_earlier(view.paths.trial(record.number))
    found = [Stage(one.config, one.until) for one in earlier]
    return [*found, Stage(last_config(view, record), None)]


def lost_stage(record: TrialSummary, found: list[Stage]) -> str | None:
    """Return a sentence if a trial had another configuration at first that was not kept."""
    if record.accumulation is None:
        return None
    if any(one.config.train.accumulation < record.accumulation for one in found):
        return None
    return (
        f"trial {record.number} ran out of memory, and trained on with {record.accumulation} "
        "micro-batches for each step; this run has them from its beginning"
    )


@dataclass(frozen=True)
class StateCheck:
    """The comparison with one checkpoint of the trial."""

    checkpoint: str
    step: int
    num_tensors: int = 0
    num_differing: int = 0
    first: str | None = None
    """The first entry that differs, the weights before all others."""
    what: str | None = None
    largest: float | None = None

    @property
    def is_equal(self) -> bool:
        """Whether the states are the same bit for bit."""
        return self.what is None


@dataclass(frozen=True)
class Reproduction:
    """What a trial trained again has shown."""

    trial: int
    started_from: int
    end: int
    reached: int = 0
    num_rows: int = 0
    num_metrics: int = 0
    curve: Difference | None = None
    states: Sequence[StateCheck] = ()
    not_compared: Sequence[str] = ()
    notes: Sequence[str] = ()
    machine: Sequence[MachineDifference] = ()
    code: Sequence[str] = ()
    built: Sequence[str] = ()
    failure: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether everything that the trial left is the same bit for bit, and something is."""
        wrong = self.curve or self.failure or self.not_compared or self.reached < self.end
        same = all(one.is_equal for one in self.states)
        return not wrong and same and bool(self.num_rows or self.states)

    @property
    def first_step(self) -> int | None:
        """The first step at which a difference shows; None without one."""
        found = [one.step for one in self.states if not one.is_equal]
        return min([*found, *([self.curve.step] if self.curve else [])], default=None)

    def as_dict(self) -> dict[str, Any]:
        """Return the object that `--json` prints."""
        return {
            **asdict(self),
            "is_equal": self.is_equal,
            "first_step": self.first_step,
            "curve": self.curve and self.curve._asdict(),
            "machine": [one._asdict() for one in self.machine],
        }


class Difference(NamedTuple):
    """The first value in which two runs differ; None stands for a metric that a run lacks."""

    step: int
    metric: str
    first: float | None
    second: float | None


def first_difference(
    first: Sequence[Row], second: Sequence[Row], *, ignored: Collection[str] = ()
) -> Difference | None:
    """Return the first difference of two runs, as far as both have trained; None without one."""
    from trainable.watch.diagnostics import MEASURED  # which imports torch

    end = min(rows[-1].step if rows else -1 for rows in (first, second))
    one, other = ({row.step: row.metrics for row in rows} for rows in (first, second))
    for step in sorted({*one, *other}):
        if step > end:
            break
        was, now = one.get(step, {}), other.get(step, {})
        for metric in sorted({*was, *now}):
            found = was.get(metric), now.get(metric)
            if metric not in MEASURED and metric not in ignored and not _same(*found):
                return Difference(step, metric, *found)
    return None


def first_logged_difference(
    first: Sequence[tuple[int, Row]], second: Sequence[tuple[int, Row]], *, until: int
) -> Difference | None:
    """Return the first difference of what the user's code logged under its own steps."""
    one, other = ([row for row in rows if row[0] <= until] for rows in (first, second))
    for index in range(max(len(one), len(other))):
        (at, was), (then, now) = (
            rows[index] if index < len(rows) else (0, Row(0, 0, {})) for rows in (one, other)
        )
        for metric in sorted({*was.metrics, *now.metrics}):
            found = was.metrics.get(metric), now.metrics.get(metric)
            if was.step != now.step or not _same(*found):
                return Difference(max(at, then), metric, *found)
    return None


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


_COMPARED = {
    "gradsweep.version.python": "python",
    "gradsweep.version.torch": "torch",
    "gradsweep.version.numpy": "numpy",
    "gradsweep.version.gradsweep": "gradsweep",
    "gradsweep.platform": "platform",
    "gradsweep.cpu": "cpu",
    "gradsweep.gpus": "gpus",
    "gradsweep.environment": "environment",
}
"""The tags that are compared, with their words."""


class MachineDifference(NamedTuple):
    """Something that was another one in the sweep; several, if it changed while that ran."""

    what: str
    then: str
    now: str

    def __str__(self) -> str:
        return f"{self.what} is {self.now} here and was {self.then} in the sweep"


def machine_differences(
    attempts: Sequence[Mapping[str, str]], now: Mapping[str, str]
) -> Iterator[MachineDifference]:
    """Yield what differs from what the drivers of a sweep recorded of their machines."""
    for key, what in _COMPARED.items():
        then = {attempt[key] for attempt in attempts if key in attempt}
        if then and then != {now.get(key)}:
            yield MachineDifference(what, ", ".join(sorted(then)), now.get(key, "none"))
