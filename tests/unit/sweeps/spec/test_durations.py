"""Durations on the command line."""

from __future__ import annotations

import pytest

from sweeps.errors import WrongDuration
from sweeps.formatting import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("2m", 120), ("90", 90), ("1m30s", 90), ("1h", 3600), ("0", 0), ("0.5s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--grace") == seconds


@pytest.mark.parametrize("text", ["", "soon", "-3", "3 d", "s", "1e3", "30S"])
def test_invalid_duration_is_refused(text: str) -> None:
    with pytest.raises(WrongDuration, match=r"--grace is .* write for example 30s, 2m"):
        parse_duration(text, "--grace")


def test_duration_beyond_any_clock_is_refused() -> None:
    assert parse_duration("8760h", "--grace") == 31_536_000
    for text in ("8761h", "9" * 400):
        with pytest.raises(WrongDuration, match=r"--grace is '.*'; a duration is at most a year"):
            parse_duration(text, "--grace")
