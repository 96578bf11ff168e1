"""`sweep train NAME --trial K`: train a trial of a sweep again, and compare the two curves.

The run is configured as the trial was: its own resolved configuration with all seeds, and the same
number of threads. What must not live here: training (`train`), and comparing (`same_curve`).
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sweeps.commands import messages
from sweeps.commands.train import SingleRun, train_once
from sweeps.config.trial_run import num_threads
from sweeps.operations.code_directory import enter_code_directory
from sweeps.operations.retraining import check_single, last_config, lost_stage, stages
from sweeps.results.machine_differences import machine_differences
from sweeps.results.same_curve import first_difference
from sweeps.results.sweep_status import SweepStatus
from tracking.provenance import provenance
from trainable.metrics_file import read_rows

if TYPE_CHECKING:
    from sweeps.ledger.trials import TrialSummary


def train_again(
    view: SweepStatus,
    number: int,
    directory: Path | None,
    console: Console,
    err: Console,
    figures: Path | None = None,
) -> None:
    """Train a trial again from its beginning to where it ended, and say whether it is the same.

    The sweep is only read.

    Args:
        view: The sweep.
        number: The trial.
        directory: Receives the checkpoints; None: a temporary directory.
        console: Receives the metrics, and the result of the comparison.
        err: Receives messages.
        figures: Receives figures of the run; None: draw none.

    Raises:
        UnknownTrial: There is no such trial.
        UserError: No single run trains it.
        OtherRun: `directory` holds another run.
        TrainingError: The training fails.
    """
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
    for caution in _cautions(view, record):
        messages.sentence(err, caution, style="yellow")
    # As in a worker: numerical libraries read it when they are imported.
    os.environ.setdefault("OMP_NUM_THREADS", str(run.threads))
    with ExitStack() as stack:
        if directory is None:
            made = tempfile.TemporaryDirectory(prefix="sweep-train-")
            directory = Path(stack.enter_context(made))
        train_once(view.spec, directory, console, err, figures, run)
        _compare(view, record, directory, console)


def _cautions(view: SweepStatus, record: TrialSummary) -> Iterator[str]:
    """Yield why the training may not have the same bits, in sentences."""
    found = stages(view, record)
    if lost := lost_stage(record, found):
        yield lost
    elif len(found) > 1:
        steps = ", ".join(str(one.until) for one in found[:-1])
        exact = view.paths.command("reproduce", "--trial", str(record.number))
        yield (
            f"trial {record.number} had other configurations until step {steps}; this run has the "
            f"last one from its beginning; train it as it was with: {exact}"
        )
    for difference in machine_differences(view.ledger.attempts, provenance()):
        yield f"{difference}; the same bits are promised for the same machine and versions alone"


def _compare(view: SweepStatus, record: TrialSummary, directory: Path, console: Console) -> None:
    trial, again = read_rows(view.paths.trial(record.number)), read_rows(directory)
    if not trial:
        messages.sentence(console, f"trial {record.number} has no curve to compare with", style="")
        return
    found = first_difference(trial, again)
    if found is None:
        steps = min(trial[-1].step, again[-1].step if again else 0)
        message = f"the same as trial {record.number}, bit for bit, in all {steps} steps"
        messages.sentence(console, message, style="green")
        return
    was, now = ("missing" if one is None else repr(one) for one in (found.first, found.second))
    messages.sentence(
        console,
        f"differs from trial {record.number} from step {found.step} on: {found.metric} was {was} "
        f"and is {now}; the code, the data, a version or the machine is another one, or the sweep "
        "was resumed with another configuration while the trial ran",
        style="yellow",
    )
