"""How messages quote a value: in one line, short, and without secrets.

What must not live here: numbers and sizes in tables (`formatting`), and writing YAML
(`config.yaml_scalars`).
"""

from __future__ import annotations

from redaction.escapes import printable
from redaction.secrets import redact

_SHOWN = 60  # characters of a value that a message quotes


def shown(value: object) -> str:
    """Return a value that has no place of its own as it would be written."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quoted(value) if isinstance(value, str) else cut(str(value))


def cut(text: str) -> str:
    """Return a text short enough, and printable, for a message.

    Without secrets: what shows an address to hold a password may lie beyond the cut.
    """
    text = printable(redact(text))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def quoted(text: str) -> str:
    """Return a text in quotes for a message."""
    return f"'{cut(text)}'"
