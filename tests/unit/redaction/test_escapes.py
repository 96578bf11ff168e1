"""No text controls a terminal or imitates another line."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redaction.escapes import printable, spreadsheet_cell, visible

DANGEROUS = "\x00\x07\x08\x1b\x7f\x80\x9b\x9d\u2028\u202a\u202e\u2066\u2069\u200f\ud83d"


@pytest.mark.parametrize("escape", [printable, visible])
@pytest.mark.parametrize("character", DANGEROUS)
def test_terminal_commands_are_escaped(escape: object, character: str) -> None:
    assert callable(escape)
    shown = escape(f"a{character}b")
    assert character not in shown
    assert shown.startswith("a\\")
    assert shown.isascii()


@given(st.text(st.characters() | st.sampled_from("\n\r\x1b\x9b\u202e")))
def test_control_characters_except_tab_and_newline_are_escaped(text: str) -> None:
    assert printable(text).isprintable()
    kept = visible(text).replace("\n", "").replace("\t", "")
    assert not [c for c in kept if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")]
    kept.encode()


def test_newlines_and_ordinary_text_are_kept() -> None:
    assert visible("größe\t1\xa0€\n日本 👩\u200d🔬") == "größe\t1\xa0€\n日本 👩\u200d🔬"
    assert visible("10%\r20%\r\n30%\n\r40%") == "10%\n20%\n30%\n\n40%"
    assert printable("one\ntrial 2 complete") == "one\\ntrial 2 complete"


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("=1+1", "'=1+1"), ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"), ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"), (" =1", "' =1"), ("\t=1", "\\t=1"), ("\r=1", "\\r=1"),
        ("\uff1d1", "'\uff1d1"), ("--lr", "'--lr"), ("-", "'-"), ("+", "'+"),
        ("-1", "-1"), ("+2.5e-3", "+2.5e-3"), ("-.5", "-.5"), ("-inf", "-inf"), ("adam", "adam"),
        ("a;=1", "a;'=1"), ('a; @SUM("x")', "a;' @SUM(\"x\")"), ("a; b=1", "a; b=1"),
        ("a=1", "a=1"), ("\x1b[2J", "\\x1b[2J"), ("\x9b2J\n", "\\x9b2J\\n"), ("", ""),
        (-1, -1), (-0.5, -0.5), (None, None), (True, True),
    ],
)  # fmt: skip
def test_text_in_a_table_is_neither_a_formula_nor_an_escape(cell: object, shown: object) -> None:
    assert spreadsheet_cell(cell) == shown
