"""Whether a result holds: `sweep audit`, `sweep test`, `sweep reproduce` and `sweep verify`.

What must not live here: finding that out (`trust`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
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
    path_option,
    show_found,
    trial_option,
    view_of,
)
from sweeps.cli.plain_console import line
from sweeps.errors import LATE, NO_SUCCESS
from sweeps.formatting import format_best, format_time, joined

if TYPE_CHECKING:
    from sweeps.trust.audit.read import Audit
    from sweeps.trust.evaluation import TrialTest
    from sweeps.trust.reproduction import Reproduction, StateCheck
    from sweeps.trust.verification import Verification
    from sweeps.view.sweep_view import SweepView


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
        from sweeps.view.sweep_view import NoBest

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


def verify(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Compare all files that a sweep keeps with each other; nothing is changed."""
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.paths import SweepPaths, resolve_root
        from sweeps.trust.verification import verify

        paths = SweepPaths(resolve_root(root), name)
        found = verify(paths, spinner.update)
    show_found(found.as_dict(), as_json, lambda: Group(*_verify_lines(found, name)))
    if found.contradictions:
        raise typer.Exit(LATE)


def _verify_lines(found: Verification, name: str) -> Iterator[RenderableType]:
    count = len(found.contradictions)
    if count:
        word = "contradiction" if count == 1 else "contradictions"
        yield Text(f"sweep '{name}' has {count} {word}", style="bold red")
    else:
        yield Text(f"sweep '{name}' is sound", style="bold green")
    for one in found.contradictions:
        yield line(f"- {one}")
    if found.checked:
        yield line(f"compared: {'; '.join(found.checked)}")
    for note in found.notes:
        yield line(note)


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


_STYLES = {"pass": "green", "warn": "yellow", "not enough data": "dim"}


def audit(name: Name, root: Root = None, as_json: AsJson = False) -> None:
    """Check whether a sweep's result can be trusted: eight cards, each with its evidence."""
    from sweeps.trust.audit.read import audit_sweep

    with input_errors():
        found = audit_sweep(view_of(name, root))
    show_found(found.as_dict() if as_json else found, as_json, lambda: _cards(found))


def _cards(found: Audit) -> RenderableType:
    """Return the cards, one below the other."""
    parts: list[RenderableType] = []
    spec = found.view.spec
    if len(spec.metrics) > 1:
        parts.append(Text(f"The cards look at the first metric, {spec.metrics[0]}.\n"))
    for card in found.cards:
        verdict = card.verdict if card.verdict == "not enough data" else card.verdict.upper()
        parts += [
            Text.assemble(
                (verdict, _STYLES[card.verdict]), "  ", (card.question, "bold"), f"  ({card.id})"
            ),
            Text(card.evidence),
        ]
        command = found.command(card)
        if card.remedy is not None and command is not None:
            parts.append(line(f"{card.remedy}: {command}"))
        elif card.remedy is not None:
            parts.append(Text(card.remedy))
        parts.append(Text())
    count = len(found.cards)
    parts.append(
        Text(f"{len(found.warned)} of {count} cards warn, from {found.num_trials} ended trials")
    )
    return Group(*parts)
