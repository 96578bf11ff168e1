"""One training run in this process, without Ray: for a debugger.

The spec's `train` section is used as it stands; the search space is not sampled.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sweeps.engine.preflight import Facts
from sweeps.formats import format_number
from sweeps.results import messages
from sweeps.spec.problems import Fault, Refused, key_path
from sweeps.spec.spec import SweepSpec
from trainable.config import TrialConfig
from trainable.errors import ConfigError

if TYPE_CHECKING:
    from trainable.loop import Trainer
    from trainable.own_loop import OwnLoop

_OURS = re.compile("epoch|memory/.*|best/.*")
"""What is reported beside what a loop of the user's own yields."""
_SHOWN = ("train/loss", "val/loss", "val/accuracy", "train/lr", "train/grad_norm")


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
    """
    sys.path.insert(0, os.getcwd())  # a user's task module lies where the command was typed
    from trainable.build import open_trainer

    with ExitStack() as stack:
        if directory is None:
            directory = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep-train-"))
            )
        config = spec.trial_config(0, {})
        device = "cpu" if spec.resources.gpu == 0 else None  # as its trials
        stack.enter_context(_naming_keys())
        trainer = open_trainer(config, directory, device=device)
        stack.callback(trainer.close)
        for sentence in trainer.store.set_aside:
            console.print(sentence, style="yellow", soft_wrap=True)
        facts = _facts(config, trainer)
        messages.task_facts(err, facts)
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
def _naming_keys() -> Iterator[None]:
    """What of the configuration cannot be trained, as the refusal of a key."""
    try:
        yield
    except ConfigError as error:
        if not error.key:
            raise
        raise Refused([Fault(key_path(error.key), error.message)]) from error


def _facts(config: TrialConfig, trainer: Trainer | OwnLoop) -> Facts:
    """The same as before a sweep; what deserves caution was said when the trainer was built."""
    from trainable.loop import Trainer
    from trainable.preflight import measure

    if not isinstance(trainer, Trainer):
        return Facts(own_loop=True)
    return Facts(**measure(config, trainer.groups, trainer.plans, trainer.precision))
