"""`sweep train`: one training run in this process, without Ray, for use with a debugger.

Of a sweep file, it uses the `train` section unchanged and does not sample the search space. With
TRIAL, it trains a trial of a sweep again; `sweep audit --reproduce` compares the two.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from sweeps.cli import messages
from sweeps.engine.system_limits import LimitTooSmall, shortages
from sweeps.engine.task_check import TaskInspector, TaskRefused, check_names
from sweeps.errors import Issue, UserError
from sweeps.formatting import format_duration, format_number
from sweeps.path_checks import make_private
from sweeps.paths import TRIAL_CONFIG, program_name
from sweeps.recording.trial_config import read_config
from sweeps.run.task_code import as_a_trial, enter_code_directory
from sweeps.spec.error_messages import key_path
from sweeps.spec.revisions import changes
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.spec.trial_run import num_threads
from sweeps.trust.reproduction import check_single, last_config
from sweeps.view.sweep_view import SweepView
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.errors import ConfigError, TrainingCaution
from trainable.processes.local_ranks import local_ranks
from trainable.store.regular_files import replace_regular

if TYPE_CHECKING:
    from trainable.custom_loop import CustomLoop
    from trainable.loop import Trainer

_OURS = re.compile("epoch|report|memory/.*|best/.*")
"""The metrics that Gradsweep adds to those that a custom loop yields."""
_SHOWN = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")

_MAY_CHANGE = ("budget", "checkpoint")
"""Sections that may differ when a run resumes: how long it trains, and what it saves."""
_SHOWN_CHANGES = 3


@dataclass(frozen=True)
class SingleRun:
    """What `sweep train` trains, until a report; None: the last one of the budget."""

    config: TrialConfig
    threads: int | None = None
    searched: tuple[str, ...] = ()
    until: int | None = None

    @property
    def reports(self) -> int:
        """How many reports it makes."""
        return self.until or self.config.budget.reports


class OtherRun(ValueError):
    """The directory holds a run with another configuration."""


def check_task(spec: SweepSpec, err: Console, directory: Path | None = None) -> None:
    """Check the task in a child process, as a sweep does, and print facts and warnings.

    An exception of the task's own code is ignored: it is raised again in this process, where a
    debugger can catch it.
    """
    with ExitStack() as stack:
        stack.enter_context(err.status("checking the task"))
        resumed = directory is not None and (directory / TRIAL_CONFIG).exists()
        inspection = TaskInspector(spec, None, resumed=resumed)
        stack.callback(inspection.terminate)
        _import_torch()  # while the child imports it, too
        try:
            facts = inspection.facts()
        except TaskRefused as refused:
            if not refused.raised:
                raise
            return
    messages.task_facts(err, facts)


def _import_torch() -> None:
    """Import the training code."""
    try:
        import trainable.build  # noqa: F401
    except (ImportError, OSError, MemoryError) as error:
        if found := shortages():
            raise LimitTooSmall(
                f"torch cannot be imported here ({error or 'out of memory'}); {'; '.join(found)}"
            ) from error
        raise


def train_once(
    spec: SweepSpec,
    directory: Path | None,
    console: Console,
    err: Console,
    figures: Path | None = None,
    run: SingleRun | None = None,
) -> dict[str, float]:
    """Train until the budget is used, or resume; return the last report's metrics."""
    command = shlex.join((program_name(), *sys.argv[1:]))
    check_names(spec)
    run = run or SingleRun(spec.trial_config(0, {}))
    config = run.config
    from trainable.build import open_trainer
    from trainable.loop import Trainer

    kept, signals = directory, list[int]()
    with ExitStack() as stack:
        stack.enter_context(as_a_trial(spec))
        if directory is None:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-train-"))
            )
        _check_same_run(directory, run.config)
        place, drawn = directory, figures
        if kept is not None:
            place = stack.enter_context(make_private(kept, "--dir"))
        if figures is not None:
            drawn = stack.enter_context(make_private(figures, "--figures"))
        device = "cpu" if spec.resources.gpu == 0 else None  # as in a sweep's trials
        threads = run.threads
        if config.workers > 1 and threads is None:  # the ranks share this machine
            threads = num_threads(spec.resources.cpu)
        stack.enter_context(_locating_config_errors())
        ranks = stack.enter_context(
            local_ranks(config, place, searched=run.searched, device=device, threads=threads)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainingCaution)  # `check_task` prints them
            trainer = open_trainer(
                config,
                place,
                device=device,
                threads=threads,
                searched=run.searched,
                until=run.until,
                should_stop=lambda: bool(signals),
                ranks=ranks,
            )
        stack.callback(trainer.close)
        stack.enter_context(_saving_at_a_signal(signals, err))
        for sentence in trainer.store.set_aside:
            console.print(sentence, style="yellow", soft_wrap=True)
        plan = trainer.report_plan if isinstance(trainer, Trainer) else None
        if trainer.store.saved_epoch() >= run.reports:
            messages.sentence(
                err, f"{directory}: this run is complete; nothing to train", style=""
            )
        elif trainer.resumed_at:
            total = plan.total_steps if plan else run.reports  # a custom loop counts reports
            message = f"{directory}: resumes at step {trainer.resumed_at} of {total}"
            messages.sentence(err, message, style="")
        replace_regular(place / TRIAL_CONFIG, trial_yaml(config).encode())
        progress = stack.enter_context(
            _RunProgress(console, trainer, spec.name, run.reports, spec.budget.report_word)
        )
        metrics: dict[str, float] = {}
        for report in trainer.events():
            metrics, progress.epoch = report.metrics, report.epoch
            yielded = [key for key in metrics if not _OURS.fullmatch(key)]
            keys = dict.fromkeys((*spec.metrics, *(_SHOWN if plan else yielded)))
            shown = ", ".join(
                f"{key} {format_number(metrics[key])}" for key in keys if key in metrics
            )
            word = spec.budget.report_word
            messages.paragraph(console, f"{word} {report.epoch} step {report.step}: {shown}")
            for sentence in report.signals:
                messages.paragraph(console, f"  {sentence}", style="yellow")
        is_complete = trainer.store.saved_epoch() >= run.reports
        if figures is not None and drawn is not None and not signals:
            from trainable.figures import draw_run

            for path in draw_run(config, trainer, place, drawn):
                console.print(f"wrote {figures / path.name}", soft_wrap=True)
    if signals and not is_complete:
        _describe_end(err, signals[0], kept, command)
        raise typer.Exit(128 + signals[0])
    return metrics


@contextmanager
def _saving_at_a_signal(received: list[int], err: Console) -> Iterator[None]:
    """Note the first signal, at which the run saves after its step; the next one acts as ever."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {one: signal.getsignal(one) for one in numbers}

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)
        restore()
        name = signal.Signals(number).name
        messages.sentence(err, f"{name}: saving after this step; once more ends at once", style="")

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, note)
    try:
        yield
    finally:
        restore()


def _describe_end(err: Console, number: int, directory: Path | None, command: str) -> None:
    """Print what a run has saved that a signal has ended, and how it continues."""
    name = signal.Signals(number).name
    if directory is None:
        message = (
            f"ended by {name}; nothing is kept without --dir; a run that is saved and resumes: "
            f"{command} --dir DIR"
        )
    else:
        saved = CheckpointStore(directory).generations()
        what = f"saved at step {saved[-1].step}" if saved else "nothing was saved yet"
        message = f"ended by {name}; {what} in {directory}; continue with: {command}"
    messages.sentence(err, message, style="")


class _RunProgress(Progress):
    """A bar of reports and remaining time; steps move it, or reports of a custom loop."""

    def __init__(
        self,
        console: Console,
        trainer: Trainer | CustomLoop,
        name: str,
        reports: int,
        word: str,
    ) -> None:
        self._bar: TaskID | None = None  # the base class draws at once
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{{task.fields[epoch]}}/{reports} {word}s"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._trainer = trainer
        self._epochs = reports
        self.epoch = trainer.store.saved_epoch()
        """How many reports are made."""
        self._began, self._first = time.monotonic(), self._position()
        self._bar = self.add_task(name, total=self._epochs, epoch=self.epoch, left="")

    def get_renderables(self) -> Iterator[RenderableType]:
        """Move the bar to the current step before it is drawn."""
        if self._bar is not None:
            position = self._position()
            self.update(self._bar, completed=position, epoch=self.epoch, left=self._left(position))
        yield from super().get_renderables()

    def _left(self, position: float) -> str:
        """Return the remaining time by the speed since this process began."""
        done, left = position - self._first, self._epochs - position
        if done <= 0 or left <= 0:
            return ""
        return f"about {format_duration((time.monotonic() - self._began) * left / done)} left"

    def _position(self) -> float:
        """Return how many reports are made, with the part of the next one."""
        from trainable.loop import Trainer

        if not isinstance(self._trainer, Trainer):
            return float(self.epoch)
        progress, plan = self._trainer.state.progress, self._trainer.report_plan
        return progress.reports + min(progress.since_report / plan.windows_per_report, 1.0)


def _check_same_run(directory: Path, config: TrialConfig) -> None:
    """Check that a directory holds no run with another configuration."""
    file = directory / TRIAL_CONFIG
    if not file.exists():
        return
    try:
        before = read_config(file)
    except ValueError:
        raise OtherRun(
            f"{file} is not the configuration of a run; a run writes its own there under that "
            "name; choose another directory with --dir"
        ) from None
    if not CheckpointStore(directory).generations():
        return
    differing = [
        f"{key}: {was} -> {wanted}"
        for key, (was, wanted) in changes(before, config).items()
        if key.partition(".")[0] not in _MAY_CHANGE
    ]
    if differing:
        more = len(differing) - _SHOWN_CHANGES
        found = [*differing[:_SHOWN_CHANGES], *([f"and {more} more"] if more > 0 else [])]
        raise OtherRun(
            f"{directory} holds a run with another configuration: {', '.join(found)}; a run "
            "resumes only with the configuration it began with; choose another directory with "
            "--dir"
        )


@contextmanager
def _locating_config_errors() -> Iterator[None]:
    """Attach the key of the spec to errors of the configuration."""
    try:
        yield
    except ConfigError as error:
        if not error.key:
            raise
        raise UserError([Issue(key_path(error.key), error.message)]) from error


def train_again(
    view: SweepView,
    number: int,
    directory: Path | None,
    console: Console,
    err: Console,
    figures: Path | None = None,
) -> None:
    """Train a trial again, from its beginning to where it ended; the sweep is only read."""
    record = view.record(number)
    check_single(view, record)
    start = enter_code_directory(view, partial(messages.sentence, err))
    directory, figures = directory and start / directory, figures and start / figures
    run = SingleRun(
        last_config(view, record),
        threads=num_threads(view.spec.resources.cpu),
        searched=tuple(record.params),
        until=record.epoch or None if record.state == "pruned" else None,
    )
    # As in a worker: numerical libraries read it when they are imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(run.threads))
    train_once(view.spec, directory, console, err, figures, run)
