"""The options of `sweep test`.

What must not live here: the evaluation and its record (`trust.evaluation`).
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from sweeps.cli.console import (
    AsJson,
    Name,
    Offline,
    Root,
    err,
    fail,
    imports_task,
    input_errors,
    show_found,
    trial_option,
    view_of,
)
from sweeps.cli.plain_console import line
from sweeps.exit_codes import NO_SUCCESS
from sweeps.formatting import format_best, format_time, joined

if TYPE_CHECKING:
    from sweeps.trust.evaluation import TrialTest
    from sweeps.view.sweep_view import SweepView


@imports_task
def evaluate(
    name: Name,
    trial: Annotated[int | None, trial_option("Test this trial instead of the best.")] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Evaluate also if the trial was tested before.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="Evaluate although the task's model or data have changed since.",
        ),
    ] = False,
    offline: Offline = False,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the best trial on test data that no trial has used, and record the values."""
    from sweeps.cli import messages

    with err.status("reading the sweep"), input_errors():
        from sweeps.trust.evaluation import evaluate_trial
        from sweeps.view.sweep_view import NoBest

        view = view_of(name, root)
    with input_errors(), err.status("testing") as spinner:
        try:
            done = evaluate_trial(
                view,
                trial,
                again=again,
                accept_changes=accept_changes,
                offline=offline,
                doing=spinner.update,
            )
        except NoBest as error:
            fail(str(error), code=NO_SUCCESS)
    show_found(done.as_dict(), as_json, lambda: _shown(done, view))
    for caution in (*done.cautions, *filter(None, [done.undelivered])):
        messages.sentence(err, caution, style="yellow")


def _shown(done: TrialTest, view: SweepView) -> RenderableType:
    """Return the lines of `sweep test`."""
    newest, spec, record = done.results[-1], view.spec, done.record
    word = spec.budget.report_word
    final = spec.select == "final"
    when = datetime.fromtimestamp(newest.timestamp_ms / 1000).astimezone().isoformat()
    chosen = format_best(spec.metrics, record.result or [], final=final)
    lines: list[RenderableType] = [
        Text(f"trial {record.number} on test data: {joined(newest.metrics)}", style="bold"),
        Text(f"chosen by validation: {chosen}"),
        Text(
            f"{newest.num_samples:,} samples, checkpoint of {word} {newest.epoch}, step "
            f"{newest.checkpoint_step}; {newest.precision} on {newest.device}"
        ),
    ]
    if not done.is_new:
        again = view.paths.command("test", "--trial", str(record.number), "--again")
        lines.append(line(f"recorded {format_time(when)}; evaluate again with: {again}"))
    if done.pending:
        waiting = f"{done.pending} records are not delivered to the tracking store yet"
        lines.append(line(f"{waiting}; deliver them with: {view.paths.command('sync')}"))
    return Group(*lines)
