"""The priority of a process that a command waits for."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from tracking.processes import raise_priority, start_idle


def test_each_living_thread_is_no_longer_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_idle([sys.executable, "-c", "input()"], os.environ)
    asked: list[int] = []

    def set_class(thread: int, *_: Any) -> None:
        asked.append(thread)
        if thread != process.pid:
            raise ProcessLookupError  # it has ended since it was listed

    monkeypatch.setattr(os, "listdir", lambda _: ["1", str(process.pid)])
    monkeypatch.setattr(os, "sched_setscheduler", set_class)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)
    raise_priority(process)
    assert asked == [1, process.pid]
    with process:
        process.kill()
    raise_priority(process)
    assert asked == [1, process.pid], "its number may be another process' by now"
