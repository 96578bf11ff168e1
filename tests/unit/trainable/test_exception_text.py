"""Text of an exception is short, on one line if needed, and without secrets."""

from __future__ import annotations

import pytest

from trainable.failures import LONGEST_REASON, reason_of, traceback_of


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_reason_is_one_line_and_imitates_none() -> None:
    error = ValueError("bad\ntrial 7 complete, best 0.0\r\x1b[2J\u202e\x9b")
    assert reason_of(error, "error") == (
        r"ValueError: bad\ntrial 7 complete, best 0.0\r\x1b[2J\u202e\x9b"
    )
    assert reason_of(ValueError(), "error") == "ValueError"
    assert reason_of(ValueError("x"), "out_of_memory") == "out_of_memory: x"


def test_an_endless_text_is_cut_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DB_PASS", "canary7f3a")
    error = _raised(ValueError("-" * 3_000_000 + "canary7f3a"))
    assert len(reason_of(error, "error")) == LONGEST_REASON + 1
    assert len(traceback_of(error)) < 5_000
    lines = _raised(ValueError("canary7f3a\n" * 100_000))
    assert len(traceback_of(lines)) < 10_000
    assert "canary" not in traceback_of(lines) + reason_of(lines, "error")
    assert traceback_of(lines).startswith("Traceback")


def test_a_secret_of_several_lines_is_hidden_whole() -> None:
    key = "-----BEGIN PRIVATE KEY-----\ncanary7f3a\ncanary7f3b\n-----END PRIVATE KEY-----"
    shown = traceback_of(_raised(ValueError(f"{key} is no key")))
    assert "canary" not in shown
    assert shown.endswith("-----END PRIVATE KEY----- is no key\n")


def test_unprintable_text_hides_no_error() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert reason_of(Mute(), "error") == "Mute: its text cannot be shown: RuntimeError"
    assert "Mute" in traceback_of(_raised(Mute()))
