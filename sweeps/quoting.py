"""Quote values in messages: in one line, short, and without secrets.

What must not live here: numbers and sizes in tables (`formatting`), and writing YAML
(`config.yaml_scalars`).
"""

from __future__ import annotations

from redaction.escapes import printable
from redaction.secrets import redact

_SHOWN = 60  # characters of a quoted value


def shown(value: object) -> str:
    """Return a value as a spec would contain it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quoted(value) if isinstance(value, str) else cut(str(value))


def cut(text: str) -> str:
    """Return a text that is short and printable, for a message.

    Secrets are redacted before the text is shortened, because a shortened one may not be
    recognized.
    """
    text = printable(redact(text))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def quoted(text: str) -> str:
    """Return a text in quotes for a message."""
    return f"'{cut(text)}'"
