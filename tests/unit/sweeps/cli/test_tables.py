"""Text in the terminal: literal, without control of it, in lines and in tables."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from sweeps.cli import console as commands_console
from sweeps.cli import render
from sweeps.cli.app import app
from sweeps.cli.plain_console import PlainConsole, TextTable, plain_table
from sweeps.cli.run_console import PlainLines
from sweeps.formatting import format_value, joined, titles
from sweeps.report.report import table
from sweeps.spec.spec import parse_spec
from sweeps.view.observer import TrialStart
from sweeps.view.sweep_progress import SweepProgress
from trainable.errors import TaskError

COLUMNS = ("trial", "state", "val/loss", "reason")
ROWS = [
    ("0", Text("complete", style="green"), "0.123", ""),
    ("17", Text("failed", style="red"), "-", "non_finite: 損失 is nan, " + "x" * 60),
]


def _render(shown: TextTable | Table, width: int) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system="standard")
    console.print(shown, crop=False)
    return file.getvalue()


@pytest.mark.parametrize("width", [40, 120])
def test_the_table_of_many_rows_looks_like_any_other(width: int) -> None:
    grid = TextTable(COLUMNS, right={"val/loss"})
    table = plain_table(*COLUMNS, right={"val/loss"})
    for row in ROWS:
        grid.rows.append(row)
        table.add_row(*row)
    plain = [Text.from_ansi(_render(one, width)).plain.splitlines() for one in (grid, table)]
    assert [line.rstrip() for line in plain[0]] == plain[1]
    assert "\x1b[32mcomplete" in _render(grid, width)


def test_no_word_is_cut_on_a_narrow_terminal() -> None:
    table = plain_table("trial", "val/loss", "checkpoint", "reason", right={"val/loss"})
    path = "/runs/small/trials/0017/checkpoints/step-00000230"
    table.add_row("17", "0.02383", path, "out of memory " * 5)
    table.add_row("18", Text("0.007249", style="green"), path, "")
    lines = Text.from_ansi(_render(table, 20)).plain.splitlines()
    assert lines[0].split() == ["trial", "val/loss", "checkpoint", "reason"]
    assert lines[1].split()[:3] == ["17", "0.02383", path]
    assert " ".join(lines[1:-1]).split()[3:] == ["out", "of", "memory"] * 5
    assert len(lines) > 4, "the reason gives way between its words"
    assert lines[-1].split() == ["18", "0.007249", path]
    assert [line.rstrip() for line in lines] == lines, "blanks would be lines of their own"


def test_a_row_is_one_line_whatever_its_cells_hold() -> None:
    grid = TextTable(("trial", "reason", "epoch"), right=())
    grid.rows.append(("0", "CUDA error: assert\nCUDA kernel errors", "3"))
    lines = Text.from_ansi(_render(grid, 120)).plain.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["0", "CUDA", "error:", "assert", "CUDA", "kernel", "errors", "3"]
    ]


def test_columns_without_room_are_named_and_a_reason_has_two_lines() -> None:
    columns = ("trial", "state", "lr", "warmup", "dropout", "reason")
    grid = TextTable(columns, right={"lr"}, optional=("lr", "warmup", "dropout"), prose="reason")
    reason = "RuntimeError: the shapes 64x784 and 64x10 cannot be multiplied in layer three"
    grid.rows.append(("3", "failed", "0.00443", "0.2146", "0.1", reason))
    grid.rows.append(("4", "pruned", "0.00178", "0.2161", "0.3", "asha at epoch 2"))
    lines = [line.rstrip() for line in Text.from_ansi(_render(grid, 60)).plain.splitlines()]
    assert lines == [
        "trial  state        lr  warmup  reason",
        "3      failed  0.00443  0.2146  RuntimeError: the shapes",
        "                                64x784 and 64x10 cannot be …",
        "4      pruned  0.00178  0.2161  asha at epoch 2",
        "no room for dropout",
    ]
    wide = Text.from_ansi(_render(grid, 200)).plain
    assert reason in wide
    assert "dropout" in wide
    assert "no room" not in wide


def test_titles_are_shortened_but_distinct() -> None:
    keys = ["train.optimizer.name", "train.schedule.name", "train.optimizer.lr", "task.epoch"]
    assert titles(keys, beside=("trial", "epoch")) == [
        "optimizer.name",
        "schedule.name",
        "lr",
        "task.epoch",
    ]
    assert titles(["task.a.b", "train.a.b"], beside=("a.b",)) == ["task.a.b", "train.a.b"]


ODD = ["[bold]x[/bold]", "[/]", ":smile:", "1.5 'x' http://x"]


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


def test_a_directory_in_brackets_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["init", "[old]"])
    assert (done.exit_code, "wrote [old]/sweep.yaml" in done.stdout) == (0, True), done.output


HOSTILE = "bad\ntrial 7 complete, best 0.0\r\x1b[2J\x1b]0;title\x07\x9b2J\u202e\u2066"
SHOWN = r"bad\ntrial 7 complete, best 0.0\r\x1b[2J\x1b]0;title\x07\x9b2J\u202e\u2066"
SPEC = """
name: s
task: digits
metric: val/loss
mode: min
trials: 2
budget: {epochs: 1}
space: {train.optimizer.lr: {uniform: [0.1, 0.2]}}
"""


def _console() -> PlainConsole:
    return PlainConsole(file=io.StringIO(), width=10_000)


def _shown(console: PlainConsole) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_event_of_a_sweep_is_one_line() -> None:
    console = _console()
    progress = SweepProgress(parse_spec(SPEC, "s.yaml"), clock=lambda: 0.0)
    lines = PlainLines(console, progress)
    lines.started(TrialStart(3, {"task.x": HOSTILE}, 1))
    lines.warned(3, HOSTILE)
    lines.ended(3, "failed", None, HOSTILE)
    assert _shown(console).splitlines() == [
        f"trial 3 started: task.x {SHOWN} · 0s",
        f"trial 3: {SHOWN}",
        f"trial 3 failed: {SHOWN} (1/2 trials) · 0s",
    ]


def test_one_row_is_one_line() -> None:
    console = _console()
    grid = TextTable(["trial", "reason"], right=())
    grid.rows.append(("3", HOSTILE))
    console.print(grid)
    [_, row] = _shown(console).splitlines()
    assert row.startswith("3      bad trial 7 complete")
    assert row.isprintable()


def test_values_are_one_line() -> None:
    assert format_value(HOSTILE) == SHOWN
    assert joined({"task.x": HOSTILE}) == f"task.x {SHOWN}"


def test_lines_of_a_traceback_do_not_begin_as_ours() -> None:
    console = _console()
    found: dict[str, Any] = defaultdict(
        lambda: None,
        params={},
        lineage=[],
        reports={},
        failed_attempts=[],
        health=[],
        lost_workers=[],
    )
    found["traceback"] = "Traceback\nValueError: bad\nbest: trial 9"
    console.print(render.trial(found, parse_spec(SPEC, "s.yaml")))
    assert "\n  best: trial 9\n" in _shown(console)


def test_a_page_shows_escapes() -> None:
    shown = table(["reason"], [["<b>\x1b[2J\x9b\u202e"]])
    assert r"&lt;b&gt;\x1b[2J\x9b\u202e" in shown


def test_the_traceback_of_a_task_drives_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    console = _console()
    monkeypatch.setattr(commands_console, "err", console)
    with pytest.raises(BaseException, match="3"), commands_console.input_errors():
        raise TaskError("of the task") from ValueError(f"{HOSTILE} hub_token=canary")
    assert r"\x1b[2J\x1b]0;title\x07" in _shown(console)
    assert not any(mark in _shown(console) for mark in "\x1b\x9b\r\x07\u202e")
    assert "canary" not in _shown(console)
