"""How text reaches the terminal: literally, without markup, in lines and in tables.

What must not live here: any message, and the content of a table.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from redaction.escapes import printable


def line(text: str, style: str = "") -> Text:
    """Return text that never wraps, such as a command to copy. Print it with `crop=False`."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def redraws(console: Console) -> bool:
    """Whether a console can redraw its output in place.

    A pipe cannot, even if FORCE_COLOR asks for colours, nor can a terminal of type `dumb`.
    """
    return console.file.isatty() and console.is_interactive


class PlainConsole(Console):
    """A console of plain text; control characters, and what it cannot encode, become escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape control characters; all output passes through this method."""
        for part in super().render(renderable, options):
            if part.control or part.text.isprintable():
                yield part
            else:
                lines = map(printable, part.text.split("\n"))
                yield Segment("\n".join(lines), part.style)


_GAP = 2
"""Spaces between two columns."""


def plain_table(*columns: str, right: Container[str] = ()) -> Table:
    """Return an empty table without lines; the columns in `right` are right-aligned.

    Print it with `crop=False`: a row of long words may be wider than the terminal.
    """
    table = _WordWrappedText(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


class _WordWrappedText(Table):
    """Rich's table, but it wraps cells only between words and never cuts a word.

    A number without its end is wrong, and a path or an id could not be copied. Trailing blanks of
    a row are removed: on a narrow terminal they would wrap into empty lines.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            words = [w for cell in (column.header, *column.cells) for w in str(cell).split()]
            column.min_width = max(map(cell_len, words), default=0)
        least = sum((column.min_width or 0) + _GAP for column in self.columns)
        wide = options.update(max_width=max(options.max_width, least))
        found = super().__rich_console__(console, wide)
        parts = [part for part in found if isinstance(part, Segment)]
        for line in Segment.split_lines(parts):
            while line and not line[-1].text.strip():
                line.pop()
            if line:
                line[-1] = Segment(line[-1].text.rstrip(), line[-1].style)
            yield from line
            yield Segment.line()


_PROSE_LINES = 2
_LEAST_PROSE = 24
"""The width of a column of sentences for which other columns are left out."""


class TextTable:
    """A table for many rows; line breaks in a cell become blanks.

    Rich measures and wraps every cell of its tables, which takes a second for a thousand trials.
    Here each row has one line. If the rows are wider than the terminal, the last of the `optional`
    columns are left out, and named below, behind `note`; if the last column is `prose`, it wraps
    into two lines.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        right: Container[str],
        optional: Sequence[str] = (),
        prose: str | None = None,
        note: str = "",
    ) -> None:
        self.columns, self.right = columns, right
        self.optional, self.prose, self.note = optional, prose, note
        self.rows: list[Sequence[str | Text]] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        head: list[str | Text] = [Text(name, style="bold") for name in self.columns]
        lines = [head, *([_unbroken(cell) for cell in row] for row in self.rows)]
        natural = {
            name: max(cell_len(str(cell)) for cell in column)
            for name, column in zip(self.columns, zip(*lines, strict=True), strict=True)
        }
        widths = self._fitting(natural, options.max_width)
        if sum(widths.values()) + _GAP * (len(widths) - 1) > options.max_width:
            table = plain_table(*self.columns, right=self.right)
            for row in lines[1:]:
                table.add_row(*row)
            yield table
            return
        for row in lines:
            cells = [(n, c) for n, c in zip(self.columns, row, strict=True) if n in widths]
            yield from self._line(console, cells, widths)
        hidden = [name for name in self.columns if name not in widths]
        said = [self.note, f"no room for {', '.join(hidden)}" * bool(hidden)]
        if any(said):
            last = "; ".join(filter(None, said))
            yield Text(last, style="dim", no_wrap=True, overflow="ellipsis")

    def _fitting(self, natural: dict[str, int], room: int) -> dict[str, int]:
        """Return the widths of the columns that fit."""
        widths = dict(natural)
        prose = self.prose if self.prose in widths else None

        def excess() -> int:
            return sum(widths.values()) + _GAP * (len(widths) - 1) - room

        if prose is not None and excess() > 0:
            widths[prose] = min(widths[prose], _LEAST_PROSE)
        for name in reversed(self.optional):
            if excess() > 0:
                del widths[name]
        if prose is not None:
            widths[prose] = min(natural[prose], widths[prose] - min(excess(), 0))
        return widths

    def _line(
        self, console: Console, cells: Sequence[tuple[str, str | Text]], widths: dict[str, int]
    ) -> Iterator[Segment]:
        rest: list[str] = []
        for index, (name, cell) in enumerate(cells):
            text, is_last = str(cell), index == len(cells) - 1
            if name == self.prose:
                text, *rest = _wrapped(text, widths[name], console)
            space = " " * (widths[name] - cell_len(text))
            style = console.get_style(cell.style) if isinstance(cell, Text) else None
            padded = f"{space}{text}" if name in self.right else f"{text}{space}"
            yield Segment(padded, style)
            yield Segment.line() if is_last else Segment(" " * _GAP)
        for more in rest:
            before = sum(widths[name] + _GAP for name, _ in cells[:-1])
            yield Segment(f"{' ' * before}{more}")
            yield Segment.line()


def _wrapped(text: str, width: int, console: Console) -> list[str]:
    """Return a sentence in at most two lines; the second one says that there is more."""
    lines = [line.plain.rstrip() for line in Text(text).wrap(console, width)] or [""]
    if len(lines) > _PROSE_LINES:
        last = Text(f"{lines[_PROSE_LINES - 1]} …")
        last.truncate(width, overflow="ellipsis")
        lines[_PROSE_LINES - 1 :] = [last.plain]
    return lines


def _unbroken(cell: str | Text) -> str | Text:
    return cell if isinstance(cell, Text) else " ".join(cell.splitlines())
