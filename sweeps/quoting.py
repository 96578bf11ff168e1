"""Quote values in messages: in one line, short, and without secrets.

What must not live here: numbers and sizes in tables (`formatting`), and writing YAML
(`config.yaml_scalars`).
"""

from __future__ import annotations

from redaction.escapes import printable
from redaction.secrets import redact

_SHOWN = 60  # characters of a quoted value


def shown(value: object) -> str:
    """Return a single value for a message, as it would be written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return quoted(value) if isinstance(value, str) else cut(str(value))


def cut(text: str) -> str:
    """Shorten a text for a message, with control characters escaped.

    Secrets are redacted first: after the cut, a password in a URI may not be recognizable.
    """
    text = printable(redact(text))
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def quoted(text: str) -> str:
    """Return a text in quotes for a message."""
    return f"'{cut(text)}'"
