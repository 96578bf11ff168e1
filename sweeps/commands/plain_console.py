"""A console that shows text as it stands: paths, values and other people's errors are no markup.

What must not live here: any text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from redaction.escapes import printable


def line(text: str, style: str = "") -> Text:
    """Return what stays one line however narrow the terminal is, such as a command to be copied;
    to be printed with `crop=False`.
    """
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def redraws(console: Console) -> bool:
    """Whether what was shown can be drawn again in its place. A pipe is no such place, even if
    colours are asked for (FORCE_COLOR), nor is a terminal that calls itself dumb.
    """
    return console.file.isatty() and console.is_interactive


class PlainConsole(Console):
    """Prints `[x]` and `:x:` as what they are, colours only what is asked for, and shows what
    would command a terminal, or cannot be encoded, as escapes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Yield what is printed, as all that is printed comes through here."""
        for part in super().render(renderable, options):
            if part.control or part.text.isprintable():
                yield part
            else:
                lines = map(printable, part.text.split("\n"))
                yield Segment("\n".join(lines), part.style)
