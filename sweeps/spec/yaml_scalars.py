"""Single values in YAML 1.2, read and written.

`1e-4` is a number, `on` and `12:30:00` are text. What must not live here: lists, mappings and
positions (`yaml_reader`).
"""

from __future__ import annotations

import math
import re
from typing import Any

from sweeps.formatting import shown

NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_INF = re.compile(r"([-+]?)\.(?:inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
_PLAIN = re.compile(
    r"[A-Za-z_](?:[A-Za-z0-9_./+-]| (?=[A-Za-z0-9])|:(?=[A-Za-z0-9_/]))*|[0-9]+ [a-z]+"
)
LEADING_ZERO = re.compile(r"[-+]?0[0-9]+")


def resolve(text: str) -> Any:
    """Return the value of a plain scalar by YAML 1.2's core schema."""
    if text in NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        # Cut, because Python refuses to parse very long numbers; the caller refuses its size.
        return int(text[:100], base)
    if _FLOAT.fullmatch(text):
        return float(text)
    if match := _INF.fullmatch(text):
        return float(f"{match[1]}inf")
    return float("nan") if text in _NAN else text


def write_flow(value: object) -> str:
    """Return plain data as YAML in one line, which parses to equal data."""
    if isinstance(value, dict):
        items = (f"{write_key(str(key))}: {write_flow(inner)}" for key, inner in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(write_flow, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else f"{'-' if value < 0 else ''}.inf"
    if value is None or isinstance(value, bool):
        return shown(value)
    if not isinstance(value, str):
        return str(value)  # a number is stored whole, also where a secret has its digits
    # Escaped as `$${`, so that a `${` in the text is not a variable when it is read again.
    return write_key(value.replace("${", "$${"))


def written(value: object) -> str:
    """Return a value for a message as it would be written in a spec."""
    return write_flow(value) if isinstance(value, list | dict) else shown(value)


def write_key(text: str) -> str:
    """Return a text as YAML, quoted if needed; variables are not expanded in keys."""
    if _PLAIN.fullmatch(text) and resolve(text) == text:
        return text
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    escaped = (c if c.isprintable() else f"\\U{ord(c):08x}" for c in text)
    return '"' + "".join(escaped) + '"'
