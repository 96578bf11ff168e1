"""Tables in the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sweeps.cli.plain_console import TextTable, plain_table
from sweeps.formatting import titles

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


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_word_is_cut_on_a_narrow_terminal(width: int) -> None:
    table = plain_table("trial", "val/loss", "checkpoint", "reason", right={"val/loss"})
    path = "/runs/small/trials/0017/checkpoints/step-00000230"
    table.add_row("17", "0.02383", path, "out of memory " * 5)
    table.add_row("18", Text("0.007249", style="green"), path, "")
    lines = Text.from_ansi(_render(table, width)).plain.splitlines()
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
