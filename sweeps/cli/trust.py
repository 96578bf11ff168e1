"""Whether a result can be trusted: `sweep confirm`, and `sweep audit` with `--test`,
`--reproduce` and `--files`.

What must not live here: finding that out (`trust`), and running trials (`run`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from sweeps.cli.console import (
    AsJson,
    Name,
    Offline,
    Root,
    at_most_one,
    err,
    fail,
    input_errors,
    only_with,
    out,
    path_option,
    paths_of,
    read_whole,
    show_found,
    trial_argument,
    view_and_trials,
    view_of,
)
from sweeps.cli.plain_console import line, plain_table
from sweeps.cli.run import Address, Grace
from sweeps.errors import LATE, NO_SUCCESS
from sweeps.formatting import counted, format_best, format_time, joined, parse_duration, quoted
from trainable.user_code.task_import import restart_in_hash_order

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths
    from sweeps.trust.audit.read import Audit
    from sweeps.trust.confirm import ConfirmationResult
    from sweeps.trust.evaluation import TrialTest
    from sweeps.trust.reproduction import Reproduction, StateCheck
    from sweeps.trust.verification import Verification
    from sweeps.view.sweep_view import SweepView


def _read_probability(text: object) -> float:
    """Parse a number; `trust.confirm` checks its range."""
    try:
        return float(str(text))
    except ValueError:
        raise typer.BadParameter(
            f"{quoted(str(text))} is not valid; it must be a probability from 0.5 to below 1; "
            "write for example 0.95"
        ) from None


def confirm(
    name: Name = None,
    top: Annotated[
        int | None,
        typer.Option(
            "--top",
            parser=read_whole(0),
            metavar="K",
            help="How many of the best trials; default: as the last time, or 5.",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds",
            parser=read_whole(0),
            metavar="N",
            help="Under how many seeds at most; default: as the last time, or 5.",
        ),
    ] = None,
    until: Annotated[
        float | None,
        typer.Option(
            "--until",
            parser=_read_probability,
            metavar="P",
            help="End when a trial is the best with this probability; default: as the last "
            "time, or 0.95.",
        ),
    ] = None,
    root: Root = None,
    grace: Grace = "30s",
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes", help="Confirm although the task, its code or its data has changed."
        ),
    ] = False,
    offline: Offline = False,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Train the best trials again until it is known which is the best."""
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.trust.confirm import find_confirmation
        from sweeps.view.sweep_view import SweepView

        view = view_of(name, root)
        grace_seconds = parse_duration(grace, "--grace")

        from sweeps.cli.run_console import RunConsole, run_to_end  # slow: after the errors
        from sweeps.run.prepared import RunOptions
        from sweeps.trust.confirm import ConfirmLeaders
        from sweeps.trust.confirm import confirm as operation

        display = RunConsole(spinner, console=err if as_json else out)
        code = run_to_end(
            lambda: operation(
                view,
                display,
                ConfirmLeaders(top=top, seeds=seeds, until=until),
                RunOptions(
                    grace=grace_seconds,
                    address=address,
                    accept_changes=accept_changes,
                    offline=offline,
                ),
            ),
            view.paths,
            spinner,
            command="confirm",
        )
        if code:
            raise typer.Exit(code)
        found = find_confirmation(SweepView(view.paths))
        assert found is not None
        show_found(found.as_dict(), as_json, lambda: shown(found, view.paths))
        if found.first is None:
            raise typer.Exit(NO_SUCCESS)


def shown(found: ConfirmationResult, paths: SweepPaths) -> RenderableType:
    """Return the table of the leaders, what was found, and the command that shows the winner."""
    columns = ("trial", "P(best)", "mean", "95 %", "seeds", "search saw", "time a run")
    table = plain_table(*columns, "", right=columns)
    for one in found.leaders:
        cells = one.cells()
        table.add_row(
            *(cells[column] for column in columns),
            "" if one.standing == "behind" else one.standing,
            style="bold" if one.standing == "first" else "",
        )
    lines: list[RenderableType] = [table, *map(Text, found.sentences())]
    if found.first is not None:
        if found.tied:
            more = str(2 * max(len(one.values) for one in found.tied))
            lines.append(
                line(f"train them under more seeds: {paths.command('confirm', '--seeds', more)}")
            )
        lines.append(line(f"show it: {paths.command('best', '--confirmed')}"))
    elif not found.has_ended or found.failed_leaders:
        lines.append(line(f"continue with: {paths.command('confirm')}"))
    return Group(*lines)


def audit(
    name: Name = None,
    trial: Annotated[
        int | None, trial_argument("With --test or --reproduce, this trial instead of the best.")
    ] = None,
    test: Annotated[
        bool,
        typer.Option(
            "--test",
            help="Evaluate the best trial on test data that no trial has used, and record that.",
        ),
    ] = False,
    reproduce: Annotated[
        bool,
        typer.Option(
            "--reproduce",
            help="Train the best trial again, and compare its curve and its state bit for bit.",
        ),
    ] = False,
    files: Annotated[
        bool,
        typer.Option(
            "--files", help="Compare all files of the sweep with each other; nothing is changed."
        ),
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="With --test, also if the trial was tested before."),
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option(
            "--accept-changes",
            help="With --test, although the task's model or data have changed since.",
        ),
    ] = False,
    offline: Offline = False,
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="CHECKPOINT",
            help="With --reproduce, start at the first, latest or best checkpoint, or at that of "
            "an epoch; default: at the beginning.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="METRIC",
            help="With --reproduce, do not compare this metric, such as a time that the task "
            "measures; repeatable.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        path_option("--dir", "DIR", "With --reproduce, keep the new run there."),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Check whether a result can be trusted; test or reproduce it.

    Without an option it prints eight cards, each a question with its verdict and evidence, or why
    it does not apply.
    """
    at_most_one({"--test": test, "--reproduce": reproduce, "--files": files})
    only_with(
        "--test",
        test,
        {"--again": again, "--accept-changes": accept_changes, "--offline": offline},
    )
    only_with("--reproduce", reproduce, {"--from": start, "--ignore": ignore, "--dir": directory})
    if test or reproduce:
        restart_in_hash_order()
    with err.status("reading the sweep") as spinner, input_errors():
        from sweeps.view.sweep_view import NoBest

        # a sweep whose ledger is damaged has no view
        view, numbers = (None, [trial]) if files else view_and_trials(name, [trial], root)
        number = next(iter(numbers), None)
        only_with("--test or --reproduce", test or reproduce, {"TRIAL": number})
        try:
            if view is None:
                answer = _files(paths_of(name, root), spinner.update)
            elif test:
                answer = _test(view, number, again, accept_changes, offline, spinner.update)
            elif reproduce:
                answer = _reproduce(view, number, start, directory, ignore or (), spinner.update)
            else:
                answer = _cards(view)
        except NoBest as error:
            fail(str(error), code=NO_SUCCESS)
    show_found(answer.found, as_json, lambda: Group(*answer.lines))
    for caution in answer.cautions:
        err.print(caution, style="yellow", soft_wrap=True)
    if not answer.is_good:
        raise typer.Exit(LATE)


class _Answer(NamedTuple):
    """What one operation of `sweep audit` has found."""

    found: dict[str, Any]
    lines: Iterator[RenderableType]
    is_good: bool = True
    cautions: Sequence[str] = ()


def _files(paths: SweepPaths, doing: Callable[[str], object]) -> _Answer:
    from sweeps.trust.verification import verify

    found = verify(paths, doing)
    return _Answer(found.as_dict(), _files_lines(found, paths.name), not found.contradictions)


def _test(
    view: SweepView,
    number: int | None,
    again: bool,
    accept_changes: bool,
    offline: bool,
    doing: Callable[[str], object],
) -> _Answer:
    from sweeps.trust.evaluation import evaluate_trial

    found = evaluate_trial(
        view, number, again=again, accept_changes=accept_changes, offline=offline, doing=doing
    )
    cautions = [*found.cautions, *filter(None, [found.undelivered])]
    return _Answer(found.as_dict(), _test_lines(found, view), cautions=cautions)


def _reproduce(
    view: SweepView,
    number: int | None,
    start: str | None,
    directory: Path | None,
    ignored: Sequence[str],
    doing: Callable[[str], object],
) -> _Answer:
    from sweeps.path_checks import check_private
    from sweeps.trust.reproduction import reproduce

    if directory is not None:
        check_private(directory, "--dir")
    found = reproduce(view, number, start=start, directory=directory, ignored=ignored, doing=doing)
    lines = _reproduction_lines(found, view.spec.budget.report_word)
    return _Answer(found.as_dict(), lines, found.is_equal)


def _cards(view: SweepView) -> _Answer:
    from sweeps.trust.audit.read import audit_sweep

    found = audit_sweep(view)
    return _Answer(found.as_dict(), _card_lines(found))


def _reproduction_lines(found: Reproduction, word: str) -> Iterator[RenderableType]:
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
        f"curve: the same in {counted(found.num_rows, 'row')} with "
        f"{counted(found.num_metrics, 'metric')}, to step "
        f"{min(found.reached, found.end)}"
    )


def _state(state: StateCheck) -> str:
    head = f"state at step {state.step} ({state.checkpoint})"
    if state.is_equal:
        return f"{head}: the same in all {state.num_tensors} tensors"
    most = "" if state.largest is None else f", by at most {state.largest:g}"
    more = "" if state.num_differing == 1 else f"; {state.num_differing} entries differ in all"
    return f"{head}: {state.first} {state.what}{most}{more}"


def _files_lines(found: Verification, name: str) -> Iterator[RenderableType]:
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


def _test_lines(done: TrialTest, view: SweepView) -> Iterator[RenderableType]:
    newest, spec, record = done.results[-1], view.spec, done.record
    final = spec.select == "final"
    when = datetime.fromtimestamp(newest.timestamp_ms / 1000).astimezone().isoformat()
    chosen = format_best(spec.metrics, record.result or [], final=final)
    yield Text(f"trial {record.number} on test data: {joined(newest.metrics)}", style="bold")
    yield Text(f"chosen by validation: {chosen}")
    yield Text(
        f"{counted(newest.num_samples, 'sample')}, checkpoint of {spec.budget.report_word} "
        f"{newest.epoch}, step {newest.checkpoint_step}; {newest.precision} on {newest.device}"
    )
    if not done.is_new:
        again = view.paths.command("audit", str(record.number), "--test", "--again")
        yield line(f"recorded {format_time(when)}; evaluate again with: {again}")
    if done.pending:
        waiting = f"not delivered to the tracking store yet: {counted(done.pending, 'record')}"
        yield line(f"{waiting}; deliver them with: {view.paths.command('sync')}")


_STYLES = {"pass": "green", "warn": "yellow", "not enough data": "dim"}


def _card_lines(found: Audit) -> Iterator[RenderableType]:
    spec = found.view.spec
    if len(spec.metrics) > 1:
        yield Text(f"The cards look at the first metric, {spec.metrics[0]}.\n")
    for card in found.applicable:
        verdict = card.verdict if card.verdict == "not enough data" else card.verdict.upper()
        yield Text.assemble(
            (verdict, _STYLES[card.verdict]), "  ", (card.question, "bold"), f"  ({card.id})"
        )
        yield Text(card.evidence)
        command = found.command(card)
        if card.remedy is not None and command is not None:
            yield line(f"{card.remedy}: {command}")
        elif card.remedy is not None:
            yield Text(card.remedy)
        yield Text()
    if found.not_applicable:
        yield from (Text(one, style="dim") for one in found.not_applicable)
        yield Text()
    yield Text(found.in_words())
