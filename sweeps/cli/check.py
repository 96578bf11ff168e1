"""`sweep check` and `sweep doctor`: print what was found about a spec, a sweep and this machine.

What must not live here: the checks (`run.check`, `run.doctor`).
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from sweeps.cli.console import (
    AsJson,
    File,
    Overrides,
    Root,
    err,
    input_errors,
    loaded,
    out,
    show_found,
)

if TYPE_CHECKING:
    from sweeps.run.check import CheckResult


def check(
    file: File,
    settings: Overrides = None,
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Check the task's whole contract; builds the task several times."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a spec and its task, and show what the sweep would take; starts nothing."""
    from sweeps.cli import messages
    from sweeps.run.check import check_sweep

    notes = err if as_json else out
    with loaded(file, settings) as (spec, document):
        messages.choices(notes, document)
        for module in spec.modules:  # warn before the import
            messages.sentence(notes, f"imports {module}, whose code runs", style="")
        with err.status("loading the task"):
            checked = check_sweep(file, spec, thorough=thorough, choices=document.choices)
    show_found(checked.as_dict(), as_json, lambda: _text(checked))


def _text(checked: CheckResult) -> RenderableType:
    """The result as text that wraps at words."""
    facts = (checked.resources.describe(), *checked.facts.lines())
    keys = ", ".join(checked.not_checked)
    return Group(
        Text(f"{checked.file} is valid", style="green"),
        *(Hanging("  ", fact) for fact in facts),
        Text("the plan"),
        *(Hanging(f"  {word:<10}", sentence) for word, sentence in checked.rows()),
        *(Text(warning, style="yellow") for warning in checked.warnings),
        *([Hanging("  ", f"not checked before a run: {keys}")] if keys else []),
    )


@dataclass(frozen=True)
class Hanging:
    """A sentence that wraps at words, below its own beginning."""

    before: str
    sentence: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - len(self.before))
        for number, part in enumerate(textwrap.wrap(self.sentence, width)):
            yield Text((" " * len(self.before) if number else self.before) + part)


def doctor(root: Root = None, as_json: AsJson = False) -> None:
    """Check versions, GPUs, disks and sweeps; remove what dead drivers left behind."""
    from sweeps.cli import render
    from sweeps.paths import resolve_root
    from sweeps.run.doctor import diagnose

    with input_errors():
        findings = diagnose(resolve_root(root))
    show_found(
        [finding.as_dict() for finding in findings], as_json, lambda: render.findings(findings)
    )
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(1)
