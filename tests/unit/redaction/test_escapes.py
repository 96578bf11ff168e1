"""No text controls a terminal or imitates another line."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redaction.escapes import printable, visible

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
