"""Escape control characters, so that text can neither control a terminal nor fake another line.

What must not live here: secrets (`secrets.py`), and where the text goes.
"""

from __future__ import annotations

import re

_CONTROLS = (
    *range(0x20), *range(0x7F, 0xA0),  # C0, DEL and C1
    0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A),  # text direction
    0x2028, 0x2029, 0xFEFF,  # line separators, byte order mark
    *range(0xD800, 0xE000),  # surrogates
)  # fmt: skip
_VISIBLE = {code: chr(code).encode("unicode_escape").decode() for code in _CONTROLS} | {
    ord("\t"): "\t",
    ord("\n"): "\n",
}

_FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What begins a formula in a spreadsheet, also in full width."""
_IN_COLUMN = re.compile(rf"(?<=;)(?=\s*+[{re.escape(''.join(_FORMULA))}])")
"""Where a formula begins for spreadsheets that separate columns by semicolons, as in Europe."""
_NUMBER = re.compile(
    r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,9})?|[+-]?(?:nan|inf)"
)


def printable(text: str) -> str:
    """Return a text as one line, with line breaks and other invisible characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def spreadsheet_cell(value: object) -> object:
    """Return a cell of a CSV file: a text that a spreadsheet would compute gets an apostrophe.

    Control characters are escaped as by `printable`. Numbers, also as texts, stay as they are.
    """
    if not isinstance(value, str):
        return value
    text = _IN_COLUMN.sub("'", printable(value))
    if text.lstrip().startswith(_FORMULA) and not _NUMBER.fullmatch(text):
        return f"'{text}"
    return text


def visible(text: str) -> str:
    """Return text of several lines with control characters escaped; CR becomes LF, tabs stay."""
    if text.isprintable():
        return text
    return text.replace("\r\n", "\n").replace("\r", "\n").translate(_VISIBLE)
