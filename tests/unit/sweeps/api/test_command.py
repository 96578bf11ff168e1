"""Waiting for the command that a script or a notebook runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sweeps.api import command
from tests.integration.commandline import wait_until

_DRAINS = """
import signal, sys, time
def drain(*_):
    time.sleep(0.2)
    sys.exit(130)
signal.signal(signal.SIGINT, drain)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_an_interrupt_while_it_looks_lets_the_command_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_SECONDS_BETWEEN_LOOKS", 0.01)
    ready = tmp_path / "ready"
    child = subprocess.Popen([sys.executable, "-c", _DRAINS, str(ready)])
    wait_until(ready.exists)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise KeyboardInterrupt

    code = command._wait(child, look, lambda: child.send_signal(signal.SIGINT))
    assert code == 128 + signal.SIGINT
