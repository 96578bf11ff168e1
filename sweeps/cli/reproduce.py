"""`sweep reproduce`: train a trial again, and print whether it is the same bit for bit.

What must not live here: training and comparing (`trust.reproduction`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from sweeps.cli.console import (
    AsJson,
    Name,
    Root,
    err,
    fail,
    imports_task,
    input_errors,
    path_option,
    show_found,
    trial_option,
    view_of,
)
from sweeps.cli.plain_console import line
from sweeps.exit_codes import LATE, NO_SUCCESS

if TYPE_CHECKING:
    from sweeps.trust.reproduction import Reproduction, StateCheck


@imports_task
def reproduce(
    name: Name,
    trial: Annotated[int | None, trial_option("Reproduce this trial instead of the best.")] = None,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="Start at the first, latest or best checkpoint, or at that of an epoch; default: "
            "at the beginning.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="METRIC",
            help="Do not compare this metric, such as a time that the task measures; repeatable.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        path_option("--dir", "DIR", "Keep the new run there; default: keep nothing."),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Train a trial again, and compare its curve and its state bit for bit."""
    from sweeps.path_checks import check_private

    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.trust.reproduction import reproduce as train_and_compare
        from sweeps.view.sweep_status import NoBest

        view = view_of(name, root)
        if directory is not None:
            check_private(directory, "--dir")
        try:
            found = train_and_compare(
                view,
                trial,
                start=start,
                directory=directory,
                ignored=ignore or (),
                doing=spinner.update,
            )
        except NoBest as error:
            fail(str(error), code=NO_SUCCESS)
    word = view.spec.budget.report_word
    show_found(found.as_dict(), as_json, lambda: Group(*_lines(found, word)))
    if not found.is_equal:
        raise typer.Exit(LATE)


def _lines(found: Reproduction, word: str) -> Iterator[RenderableType]:
    """Yield the result, what differs, and what may be the reason."""
    if found.is_equal:
        yield Text(f"trial {found.trial} is reproduced, bit for bit", style="bold green")
    else:
        where = "" if found.first_step is None else f": it differs from step {found.first_step} on"
        yield Text(f"trial {found.trial} is not reproduced{where}", style="bold red")
    if found.started_from:
        yield line(f"started at the checkpoint of step {found.started_from}")
    yield line(_curve(found))
    for state in found.states:
        yield line(_state(state))
    if found.reached < found.end:
        why = found.failure or f"it made its last {word}"
        yield line(f"the new run ended at step {found.reached} of {found.end}: {why}")
    for sentence in (*found.not_compared, *found.notes):
        yield line(sentence)
    for difference in found.machine:
        yield line(f"machine: {difference}")
    if found.code:
        yield line(f"code: changed since the sweep ran: {', '.join(found.code)}")
    if found.built:
        yield line(f"task: builds something else: {', '.join(found.built)}")
    if found.first_step is not None and not (found.machine or found.code or found.built):
        yield line(
            "no difference of versions, machine, code or data was found; an operation that is not "
            "deterministic, or a state that the task keeps elsewhere, may be the reason"
        )


def _curve(found: Reproduction) -> str:
    if found.curve is not None:
        was, now = (
            "missing" if one is None else repr(one)
            for one in (found.curve.first, found.curve.second)
        )
        return f"curve: at step {found.curve.step} {found.curve.metric} was {was} and is {now}"
    if not found.num_rows:
        return "curve: none to compare"
    return (
        f"curve: the same in {found.num_rows} rows with {found.num_metrics} metrics, to step "
        f"{min(found.reached, found.end)}"
    )


def _state(state: StateCheck) -> str:
    head = f"state at step {state.step} ({state.checkpoint})"
    if state.is_equal:
        return f"{head}: the same in all {state.num_tensors} tensors"
    most = "" if state.largest is None else f", by at most {state.largest:g}"
    more = "" if state.num_differing == 1 else f"; {state.num_differing} entries differ in all"
    return f"{head}: {state.first} {state.what}{most}{more}"
