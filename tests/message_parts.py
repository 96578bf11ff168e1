"""What a message must hold whatever its wording: values, names, and the remedy, in order."""

from __future__ import annotations


def assert_parts(message: str, *parts: str) -> None:
    """Fail unless a message holds each part, each behind the one before it."""
    found = 0
    for part in parts:
        at = message.find(part, found)
        assert at >= 0, f"{part!r} is missing or in another place: {message!r}"
        found = at + len(part)
