"""Replace single values in the text of a YAML file, and keep its comments.

What must not live here: whether the new text means what was intended; the caller reads it again
and compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from sweeps.errors import SpecError
from sweeps.spec import yaml_reader
from sweeps.spec.error_messages import key_path

_SCALAR = re.compile(r"""(?:"(?:\\.|[^"\\\n])*"|'(?:''|[^'\n])*'|[^\s,#\[\]{}"'&*][^\n,#\]}]*)""")


def with_values(text: str, label: str, changes: Iterable[Sequence[str]]) -> str | None:
    """Return the text with other values; None where one is no simple change."""
    for key, value in changes:
        edited = _with_value(text, label, key, value)
        if edited is None:
            return None
        text = edited
    return text


def _with_value(text: str, label: str, key: str, value: str) -> str | None:
    try:
        document = yaml_reader.parse(text, label, {})
    except SpecError:  # such as a variable that is not set here
        return None
    path = key_path(key)
    if path not in document.positions:
        if len(path) > 1 or text.lstrip().startswith("{"):
            return None
        return f"{text if text.endswith(chr(10)) else text + chr(10)}{key}: {value}\n"
    line, column = document.positions[path].order
    lines = text.splitlines(keepends=True)
    if line > len(lines):
        return None
    before, rest = lines[line - 1][: column - 1], lines[line - 1][column - 1 :]
    found = _SCALAR.match(rest)
    if found is None:  # a list or a mapping
        return None
    old = found.group().rstrip()
    lines[line - 1] = before + value + rest[len(old) :]
    return "".join(lines)
