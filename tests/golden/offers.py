"""What a task, its data and a loop's context offer, as tables for the guides.

Each row is made of a signature and the first sentence of a docstring. What must not live here:
words about a method; they stand beside it in the code.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from trainable import Context, Data, Task

CALLED = {"use_cross_entropy", "log", "log_file", "log_figure", "reads", "files_read"}
"""What a task calls on itself; all other methods are defined by the user, or inherited."""


def public_names(kind: type) -> list[str]:
    """Return the public methods, properties and documented attributes of a class."""
    methods = [name for name in vars(kind) if not name.startswith("_") and _is_code(kind, name)]
    return [*attributes_of(kind), *methods]


def task_tables() -> str:
    """Return the tables of the guide to tasks."""
    methods = [name for name in public_names(Task) if name not in attributes_of(Task)]
    return "\n".join(
        [
            *_table("You may define", _methods(Task, [n for n in methods if n not in CALLED])),
            "",
            *_table("On `self`", _methods(Task, [n for n in methods if n in CALLED])),
            *_rows((f"`{name}`", text) for name, text in attributes_of(Task).items()),
            "",
            *_table("`Data(...)`", _attributes(Data)),
        ]
    )


def loop_tables() -> str:
    """Return the table of the guide to loops."""
    methods = [name for name in public_names(Context) if name not in attributes_of(Context)]
    return "\n".join(
        [
            *_table("On `context`", _attributes(Context, "context.")),
            *_rows(_methods(Context, methods, "context.")),
        ]
    )


def attributes_of(kind: type) -> dict[str, str]:
    """Return the attributes that a class's docstring names, each with its first sentence."""
    _, _, listed = inspect.getdoc(kind).partition("Attributes:\n")  # type: ignore[union-attr]
    listed, _, _ = listed.partition("\n\n")
    entries = re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", listed, re.MULTILINE)
    return {name: _first_sentence(text) for name, text in entries}


def _is_code(kind: type, name: str) -> bool:
    value = vars(kind)[name]
    return inspect.isfunction(value) or isinstance(value, property)


def _attributes(kind: type, above: str = "") -> Iterator[tuple[str, str]]:
    yield from ((f"`{above}{name}`", text) for name, text in attributes_of(kind).items())


def _methods(kind: type, names: list[str], above: str = "") -> Iterator[tuple[str, str]]:
    for name in names:
        value: Any = inspect.getattr_static(kind, name)
        yield f"`{above}{name}{_arguments(value)}`", _first_sentence(inspect.getdoc(value) or "")


def _arguments(value: object) -> str:
    if isinstance(value, property):
        return ""
    signature = inspect.signature(value)  # type: ignore[arg-type]
    shown: list[str] = []
    for one in list(signature.parameters.values())[1:]:
        if one.kind is one.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")  # as Python writes it: what follows is given by name
        shown.append(one.name if one.default is one.empty else f"{one.name}={one.default!r}")
    return f"({', '.join(shown)})".replace("'", '"')


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=\.)\s(?=[A-Z])", paragraph)[0].rstrip(".").replace("|", "\\|")


def _table(title: str, rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    yield f"| {title} | |"
    yield "|---|---|"
    yield from _rows(rows)


def _rows(rows: Iterator[tuple[str, str]]) -> Iterator[str]:
    yield from (f"| {name} | {text} |" for name, text in rows)


PAGES = {
    "docs/guides/own-model.md": task_tables,
    "docs/guides/own-loop.md": loop_tables,
}
BEGIN = "<!-- made from docstrings: UPDATE_GOLDEN=1 pytest tests/golden/test_offers.py -->"
END = "<!-- end -->"


def with_tables(page: str, tables: str) -> str:
    """Return a page with these tables between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
