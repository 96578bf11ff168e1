"""Messages kept as golden files: a change of wording shows in the diff, and no test repeats it.

To accept a change:  UPDATE_GOLDEN=1 python -m pytest FILE, without other processes.
What must not live here: what a message must hold whatever its wording, which tests assert.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

_DIRECTORY = Path(__file__).parent / "messages"
_PLACE = re.compile(r"^\[(.*)\]$")


def compare_messages(request: pytest.FixtureRequest, messages: Sequence[str]) -> None:
    """Compare the messages of one test with those that its module's golden file holds.

    Args:
        request: The test, whose name is the key.
        messages: What was printed, a line each.
    """
    golden = _DIRECTORY / f"{request.path.stem.removeprefix('test_')}.txt"
    kept = _read(golden)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        kept[request.node.name] = list(messages)
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(_text(kept), encoding="utf-8")
    assert list(messages) == kept.get(request.node.name)


def _read(golden: Path) -> dict[str, list[str]]:
    kept: dict[str, list[str]] = {}
    lines = golden.read_text(encoding="utf-8").splitlines() if golden.exists() else []
    for line in lines:
        if place := _PLACE.match(line):
            messages = kept.setdefault(place[1], [])
        elif line:
            messages.append(line.removeprefix("  "))
    return kept


def _text(kept: dict[str, list[str]]) -> str:
    blocks = ("\n".join([f"[{name}]", *(f"  {m}" for m in kept[name])]) for name in kept)
    return "\n\n".join(blocks) + "\n"
