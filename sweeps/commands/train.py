"""One training run in this process, without Ray: for a debugger.

The spec's `train` section is used as it stands; the search space is not sampled.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sweeps.commands import messages
from sweeps.config.error_messages import key_path
from sweeps.config.revisions import changes
from sweeps.config.spec import SweepSpec, trial_yaml
from sweeps.engine.system_limits import LimitTooSmall, shortages
from sweeps.engine.task_check import TaskFacts, TaskInspector, TaskRefused, check_names
from sweeps.errors import Issue, UserError
from sweeps.formatting import format_number
from sweeps.paths import TRIAL_CONFIG
from sweeps.recording.trial_config import read_config
from tracking.address import credentials
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.errors import ConfigError
from trainable.storage.regular_files import replace_regular
from trainable.task_import import prepared

if TYPE_CHECKING:
    from trainable.custom_loop import CustomLoop
    from trainable.loop import Trainer

_OURS = re.compile("epoch|memory/.*|best/.*")
"""What is reported beside what a loop of the user's own yields."""
_SHOWN = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")

_MAY_CHANGE = ("budget", "checkpoint")
"""For how long a run is trained, and what is kept of it: the rest makes it another run."""
_SHOWN_CHANGES = 3


class OtherRun(ValueError):
    """What lies in a directory is not the run that was asked for."""


def check_first(spec: SweepSpec, err: Console) -> None:
    """Check the task in a child process, as a sweep does, and print what is probably not meant.

    What the task itself raises there is left to the run in this process, where a debugger is.

    Raises:
        TaskRefused: It cannot be trained.
    """
    with ExitStack() as stack:
        inspection = TaskInspector(spec, None)
        stack.callback(inspection.terminate)
        _import_torch()  # while the child does
        try:
            facts = inspection.facts()
        except TaskRefused as refused:
            if not refused.raised:
                raise
            return
    for caution in facts.checked:
        messages.sentence(err, caution, style="yellow")


def _import_torch() -> None:
    """Import what trains; where a limit of this process forbids it, say so.

    Raises:
        LimitTooSmall: That is so.
    """
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
) -> dict[str, float]:
    """Train to the end of the budget, or resume an earlier run in `directory`.

    Args:
        directory: Where checkpoints are kept; None keeps them only while it trains.
        console: Where the run is shown.
        err: Where everything else is said.
        figures: Where pictures of the run go; None draws none.

    Returns:
        The last report's metrics.

    Raises:
        OtherRun: Another run has saved its state in `directory`, or it is somebody else's.
    """
    check_names(spec)
    from trainable.build import open_trainer

    with ExitStack() as stack:
        stack.enter_context(_as_a_trial(spec))
        if directory is None:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-train-"))
            )
        config = _continued(directory, spec.trial_config(0, {}))
        device = "cpu" if spec.resources.gpu == 0 else None  # as its trials
        stack.enter_context(_naming_keys())
        trainer = open_trainer(config, directory, device=device)
        stack.callback(trainer.close)
        for sentence in trainer.store.set_aside:
            console.print(sentence, style="yellow", soft_wrap=True)
        facts = _facts(config, trainer)
        messages.task_facts(err, facts)
        if trainer.store.saved_epoch() >= spec.budget.epochs:
            told = f"{directory}: this run is at its end; nothing was trained"
            messages.sentence(err, told, style="")
        elif trainer.resumed_at:
            of = facts.total_steps or spec.budget.epochs  # a loop of its own counts reports
            told = f"{directory}: goes on at step {trainer.resumed_at} of {of}"
            messages.sentence(err, told, style="")
        replace_regular(directory / TRIAL_CONFIG, trial_yaml(config).encode())
        progress = stack.enter_context(
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("epochs"),
                TimeRemainingColumn(),
                console=console,
                disable=not console.is_terminal,
            )
        )
        bar = progress.add_task(spec.name, total=spec.budget.epochs)
        metrics: dict[str, float] = {}
        for report in trainer.events():
            metrics = report.metrics
            yielded = [key for key in metrics if not _OURS.fullmatch(key)]
            keys = dict.fromkeys((*spec.metrics, *(yielded if facts.own_loop else _SHOWN)))
            shown = ", ".join(
                f"{key} {format_number(metrics[key])}" for key in keys if key in metrics
            )
            console.print(f"epoch {report.epoch} step {report.step}: {shown}", soft_wrap=True)
            for sentence in report.signals:
                console.print(f"  {sentence}", style="yellow", soft_wrap=True)
            progress.update(bar, completed=report.epoch)
        if figures is not None:
            from trainable.figures import draw_run

            for path in draw_run(config, trainer, directory, figures):
                console.print(f"wrote {path}", soft_wrap=True)
    return metrics


@contextmanager
def _as_a_trial(spec: SweepSpec) -> Iterator[None]:
    """What a task sees of its process, as in a trial of a sweep."""
    withheld = credentials(spec.tracking.uri, spec.storage.ledger) & os.environ.keys()
    kept = {name: os.environ[name] for name in withheld}
    with prepared():
        os.environ.update(dict.fromkeys(withheld, ""))
        try:
            yield
        finally:
            os.environ.update(kept)


def _continued(directory: Path, config: TrialConfig) -> TrialConfig:
    """Return the configuration under the training rules with which the run in a directory was
    begun.

    Refuse a directory in which another run has saved its state, or a file of the user's own is
    where a run writes its own. A run of an earlier release has not said what it began with.
    """
    file = directory / TRIAL_CONFIG
    if not file.exists():
        return config
    try:
        before = read_config(file)
    except ValueError:
        raise OtherRun(
            f"{file} is not the configuration of a run; a run keeps its own there under that "
            "name; name another directory with --dir"
        ) from None
    if not CheckpointStore(directory).generations():
        return config
    if before.training_rules < config.training_rules:
        kept = {"training_rules": before.training_rules, "data_seed": before.data_seed}
        config = config.model_copy(update=kept)
    differing = [
        f"{key}: {was} -> {wanted}"
        for key, (was, wanted) in changes(before, config).items()
        if key.partition(".")[0] not in _MAY_CHANGE
    ]
    if differing:
        more = len(differing) - _SHOWN_CHANGES
        found = [*differing[:_SHOWN_CHANGES], *([f"and {more} more"] if more > 0 else [])]
        raise OtherRun(
            f"{directory} holds a run of another configuration: {', '.join(found)}; a run goes on "
            "only with what it began with; name another directory with --dir"
        )
    return config


@contextmanager
def _naming_keys() -> Iterator[None]:
    """What of the configuration cannot be trained, as the refusal of a key."""
    try:
        yield
    except ConfigError as error:
        if not error.key:
            raise
        raise UserError([Issue(key_path(error.key), error.message)]) from error


def _facts(config: TrialConfig, trainer: Trainer | CustomLoop) -> TaskFacts:
    """The same as before a sweep; what deserves caution was said when the trainer was built."""
    from trainable.inspect_task import measure
    from trainable.loop import Trainer

    if not isinstance(trainer, Trainer):
        return TaskFacts(own_loop=True)
    return TaskFacts(**measure(config, trainer.groups, trainer.plans, trainer.precision))
