"""What is known before a sweep runs: `sweep check` and `sweep doctor`.

What must not live here: the checks and the numbers (`trust.plan`, `run.doctor`).
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from sweeps.cli.console import (
    AsJson,
    File,
    Overrides,
    Root,
    at_most_one,
    err,
    input_errors,
    loaded,
    out,
    path_option,
    show_found,
)
from sweeps.cli.plain_console import line, plain_table
from sweeps.formatting import counted, format_duration, quoted
from sweeps.path_checks import check_file

if TYPE_CHECKING:
    from sweeps.trust.plan import PlanOption, PlanResult


_MOST_HOURS = 1e6


def _read_hours(text: object) -> float:
    """Parse a number of hours."""
    try:
        hours = float(str(text))
    except ValueError:
        hours = 0.0
    if 0 < hours <= _MOST_HOURS:
        return hours
    raise typer.BadParameter(
        f"{quoted(str(text))} is not valid; it must be a number above 0 and at most "
        f"{_MOST_HOURS:,.0f}; write for example 8"
    )


def check(
    file: File,
    settings: Overrides = None,
    hours: Annotated[
        float | None,
        typer.Option(
            "--hours",
            parser=_read_hours,
            metavar="H",
            help="Find how many trials end within so many hours.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        path_option(
            "--write", "NEW", "Write the spec with that number of trials into a new file."
        ),
    ] = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Check the task's whole contract; builds the task several times."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check a spec and its task, and show the plan; starts nothing."""
    from sweeps.cli import messages
    from sweeps.errors import UserError
    from sweeps.spec.spec import load_with_positions
    from sweeps.trust.plan import plan_sweep, write_plan

    notes = err if as_json else out
    with loaded(file, settings) as (spec, document):
        if write is not None and write.exists():
            raise UserError(
                f"{write} exists already; nothing is overwritten; remove it, or choose another "
                "name"
            )
        if write is not None:
            check_file(write, "--write")
        for module in spec.modules:  # warn before the import
            messages.sentence(notes, f"imports {module}, whose code runs", style="")
        with err.status("loading the task, and measuring some steps"):
            found = plan_sweep(
                file, spec, hours=hours, thorough=thorough, choices=document.choices
            )
            if hours is not None and document.choices and found.trials != spec.trials:
                # `auto` chooses by the number of trials, which the hours decide.
                given = [*(settings or []), f"trials={found.trials}"]
                spec, document = load_with_positions(file, given)
                found = plan_sweep(file, spec, hours=hours, choices=document.choices)
        messages.choices(notes, document)
        changed = None if write is None else write_plan(found, document, write, settings or [])
    result = found.as_dict() | {"written": None if write is None else str(write)}
    show_found(result, as_json, lambda: _text(found))
    if write is not None and not as_json:
        out.print(f"wrote {write}; changed: {changed}", soft_wrap=True)


def _text(found: PlanResult) -> RenderableType:
    """The result as text that wraps at words, and a table of what else could be done."""
    simulation = found.plan.simulation
    facts = (found.resources.describe(), *found.facts.lines())
    lines: list[RenderableType] = [
        Text(f"{found.file} is valid", style="green"),
        *(Hanging("  ", fact) for fact in facts),
        Text("the plan"),
        *(Hanging(f"  {word:<10}", sentence) for word, sentence in found.rows()),
    ]
    if simulation.repeats:
        part = (
            f", each of {simulation.trials:,} of the trials"
            if simulation.trials < found.plan.trials
            else ""
        )
        lines.append(
            Hanging(
                f"  {'':<10}",
                f"simulated: {simulation.repeats} sweeps{part}, with invented curves (power laws "
                "with noise) of trials drawn at random; a sampler that improves trains more",
            )
        )
    if len(found.options) > 1:
        lines += [Text(), Text(_title(found)), _table(found.options)]
    lines += [Text(warning, style="yellow") for warning in found.warnings]
    if found.not_checked:
        keys = ", ".join(found.not_checked)
        lines.append(Hanging("  ", f"not checked before a run: {keys}"))
    return Group(*lines)


def _title(found: PlanResult) -> str:
    if found.hours is not None:
        return "what 1 hour buys" if found.hours == 1 else f"what {found.hours:g} hours buy"
    count = counted(found.plan.trials, "trial")
    return f"what {count} take{'s' * (found.plan.trials == 1)}"


def _table(options: Sequence[PlanOption]) -> RenderableType:
    table = plain_table(
        "stopping",
        "compared at",
        "trials",
        "to the end",
        "in all",
        "time",
        right=("trials", "to the end", "in all", "time"),
    )
    for option in options:
        one = option.plan
        table.add_row(
            _difference(option),
            ", ".join(map(str, one.rungs)) or "-",
            f"{one.trials:,}",
            f"{one.simulation.complete:,.0f}",
            counted(one.expected_epochs, one.report_word),
            format_duration(one.seconds),
        )
    return table


def _difference(option: PlanOption) -> str:
    if not option.overrides:
        return f"{option.plan.rule} (this spec)"
    if option.plan.simulation.repeats:
        return ", ".join(f"{k.rpartition('.')[2]} {v}" for k, v in option.overrides.items())
    return "nothing is stopped"


@dataclass(frozen=True)
class Hanging:
    """A sentence that wraps at words, below its own beginning."""

    before: str
    sentence: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - len(self.before))
        for number, part in enumerate(textwrap.wrap(self.sentence, width)):
            yield Text((" " * len(self.before) if number else self.before) + part)


def doctor(
    trust: Annotated[
        list[str] | None,
        typer.Option(
            "--trust",
            metavar="ADDRESS",
            help="Only allow sending credentials to this store, or, of file:// and a directory, "
            "writing there; repeatable.",
        ),
    ] = None,
    forget: Annotated[
        list[str] | None,
        typer.Option(
            "--forget", metavar="ADDRESS", help="Only take back that permission; repeatable."
        ),
    ] = None,
    root: Root = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and its sweeps, clear up, or trust a store."""
    from sweeps.cli import render
    from sweeps.paths import resolve_root
    from sweeps.run.doctor import diagnose

    at_most_one({"--trust": trust, "--forget": forget})
    with input_errors():
        if addresses := trust or forget:
            _change_trust(addresses, forget=forget is not None, as_json=as_json)
            return
        findings = diagnose(resolve_root(root))
    show_found(
        [finding.as_dict() for finding in findings], as_json, lambda: render.findings(findings)
    )
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)


def _change_trust(addresses: Sequence[str], *, forget: bool, as_json: bool) -> None:
    """Change which stores are trusted; prints what changed, or as JSON all that are trusted."""
    from sweeps.errors import UserError
    from tracking import trusted_stores
    from tracking.address import origin_of

    for address in addresses:
        if not trusted_stores.can_be_trusted(address):
            raise UserError(
                "the address is not valid; it is SCHEME://HOST:PORT, without a password, as "
                "tracking.uri has it; write for example https://mlflow.example or "
                "postgresql://db.example"
            )
    lines: list[RenderableType] = []
    for address in addresses:
        origin = origin_of(address)
        if not forget:
            trusted_stores.add_trusted(address, explicit=True)
            is_file = origin.startswith("file:")
            what = "sweeps may write to" if is_file else "credentials may be sent to"
            lines.append(line(f"{what} {origin}"))
        elif trusted_stores.remove_trusted(address):
            lines.append(line(f"{origin} is removed from {trusted_stores.trust_file()}"))
        else:
            lines.append(line(f"{origin} was not in {trusted_stores.trust_file()}"))
    show_found(trusted_stores.trusted(), as_json, lambda: Group(*lines))
