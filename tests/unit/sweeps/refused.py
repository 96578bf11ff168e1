"""A spec that is refused, and what is said of it."""

from __future__ import annotations

import pytest

from sweeps.spec.spec import SpecError, parse_spec

HEAD = """\
name: digits
task: digits
metric: val/loss
mode: min
trials: 24
"""
"""What a spec cannot do without, in five lines."""


def refusal(text: str, *overrides: str) -> list[str]:
    """Return the messages about a spec that must be refused."""
    with pytest.raises(SpecError) as caught:
        parse_spec(text, "s.yaml", overrides, environ={})
    messages = str(caught.value).split("\n")
    assert len(caught.value.problems) == len(messages)
    return messages
