"""Run a function in a child process that kills itself at one call of another function.

What must not live here: what is run, or what must hold afterwards.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest


def kill_at(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    number: int,
    run: Callable[[], object],
) -> None:
    """Run a function in a fork of this process, which SIGKILL ends.

    Args:
        monkeypatch: Replaces the called function.
        owner: The module or class of that function.
        name: Its name.
        number: How many calls of it are made before.
        run: What is run; must call the other function more often.
    """
    original, calls = getattr(owner, name), iter(range(number))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    child = os.fork()
    if child == 0:
        try:
            monkeypatch.setattr(owner, name, call)
            run()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
