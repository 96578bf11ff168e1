"""Tables for the terminal: Rich's, and one for many rows.

What must not live here: what stands in them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_GAP = 2
"""Spaces between two columns."""


def plain_table(*columns: str, right: Container[str] = ()) -> Table:
    """Return an empty table without lines; the columns of `right` are aligned there."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


class Grid:
    """A table of many rows. Rich measures and wraps every cell of its own tables, a second for a
    thousand trials; where all fits on the lines as it is, there is nothing to decide.
    """

    def __init__(self, columns: Sequence[str], *, right: Container[str]) -> None:
        self.columns, self.right = columns, right
        self.rows: list[Sequence[str | Text]] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [[Text(name, style="bold") for name in self.columns], *self.rows]
        widths = [
            max(cell_len(str(cell)) for cell in column) for column in zip(*lines, strict=True)
        ]
        if sum(widths) + _GAP * (len(widths) - 1) > options.max_width:
            table = plain_table(*self.columns, right=self.right)
            for row in self.rows:
                table.add_row(*row)
            yield table
            return
        pads = [name in self.right for name in self.columns]
        for row in lines:
            for index, (cell, width, right) in enumerate(zip(row, widths, pads, strict=True)):
                text = str(cell)
                space = " " * (width - cell_len(text))
                style = console.get_style(cell.style) if isinstance(cell, Text) else None
                yield Segment(f"{space}{text}" if right else f"{text}{space}", style)
                if index < len(widths) - 1:
                    yield Segment(" " * _GAP)
            yield Segment.line()
