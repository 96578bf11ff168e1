"""Durations on the command line."""

from __future__ import annotations

import pytest

from sweeps.formatting import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("2m", 120), ("90", 90), ("1m30s", 90), ("1h", 3600), ("0", 0), ("0.5s", 0.5)],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--grace") == seconds
