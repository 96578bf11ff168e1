"""A Rich console that prints text literally: paths, values and errors are not markup.

What must not live here: any message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
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
    """A console without markup, emoji codes and automatic highlighting.

    Control characters, and characters that cannot be encoded, are printed as escapes.
    """

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
