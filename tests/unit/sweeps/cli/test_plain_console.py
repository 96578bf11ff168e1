"""Printed text is literal: brackets, colons and numbers have no markup meaning."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.plain_console import PlainConsole
from tests.unit.sweeps.sweep_factory import MadeSweep

ODD = ["[bold]x[/bold]", "[/]", "a[b]c", ":smile:", "1.5 'x' http://x", "[link=http://x]y[/link]"]


def _printed(what: object) -> str:
    file = io.StringIO()
    PlainConsole(file=file, width=80, force_terminal=True, color_system="standard").print(what)
    return file.getvalue()


@pytest.mark.parametrize("text", ODD)
def test_text_is_printed_as_it_stands(text: str) -> None:
    assert _printed(text) == f"{text}\n"
    table = Table(box=None, show_header=False)
    table.add_row(text)
    assert text in _printed(table)


def test_escape_sequences_are_shown() -> None:
    assert _printed("a\x1b[2Jb\nc\u202ed\udcff") == "a\\x1b[2Jb\nc\\u202ed\\udcff\n"


def test_a_choice_in_brackets_is_seen(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, space="{task.kind: {choice: ['[small]', '[/]']}}")
    sweep.add("complete", 0.5)
    chosen = sweep.view.rows()[0]["params"]["task.kind"]
    for command in (["trials", "small"], ["show", "small", "0"], ["best", "small"]):
        done = CliRunner().invoke(app, [*command, "--root", str(tmp_path)])
        assert chosen in done.stdout, done.output


def test_a_directory_in_brackets_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "[old]"])
    assert (done.exit_code, "wrote [old]/sweep.yaml" in done.stdout) == (0, True), done.output
