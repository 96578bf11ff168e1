"""A command that does not end in time says what it was doing."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration import hung_command
from tests.integration.hung_command import _catches, end_hung_command
from tests.time_limits import Deadline
from trainable.watch.heartbeat import DUMP_STACKS

_HANGS = f"""
import faulthandler, subprocess, time
subprocess.Popen(["sleep", "600"])  # has the pipes, too
print("trial 0 started", flush=True)
def waits_for_nothing():
    faulthandler.register({int(DUMP_STACKS)}, all_threads=True)
    time.sleep(600)
waits_for_nothing()
"""


def test_hung_command_shows_its_stacks_and_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hung_command, "_END_SECONDS", 1.0)
    trial = tmp_path / "small/trials/0000"
    trial.mkdir(parents=True)
    (trial / "trial.log").write_text("what the task printed\n")
    with subprocess.Popen(
        [sys.executable, "-c", _HANGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as hung:
        deadline = Deadline(60)
        while not _catches(hung.pid, DUMP_STACKS):
            assert not deadline.passed
            time.sleep(0.02)
        (child,) = psutil.Process(hung.pid).children()
        try:
            found = end_hung_command(hung, tmp_path)
        finally:
            child.kill()
    assert hung.returncode is not None
    for part in ("in waits_for_nothing", "what the task printed", "trial 0 started", "heartbeats"):
        assert part in found
