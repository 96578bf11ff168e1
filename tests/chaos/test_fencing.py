"""Row 28, the checkpoint store: a stopped process that was replaced wakes up and can change
nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration.commandline import wait_until
from tests.time_limits import scaled
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import read_rows

ROOT = Path(__file__).parents[2]
# Trains, and stops itself at the given place until it is told to go on.
PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from trainable import TrialConfig
from trainable.store import metrics_file
from trainable import open_trainer
from trainable.store.local import LocalFiles

directory, place = Path(sys.argv[1]), sys.argv[2]
config = TrialConfig.model_validate({
    "task": {"name": "spiral"}, "metric": "val/loss", "mode": "min", "budget": {"epochs": 3},
    "checkpoint": {"every": "2 steps"},
})

def stopping(owner, name, number):
    original, calls = getattr(owner, name), iter(range(1, 10**9))
    def stop_and_go_on(*arguments):
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(*arguments)
    setattr(owner, name, stop_and_go_on)

if place == "rename":  # the fifth passes by: a state, or the generation it replaces
    stopping(LocalFiles, "rename", 6)
elif place == "commit":
    stopping(LocalFiles, "commit", 3)
elif place == "remove":
    stopping(LocalFiles, "remove", 1)
elif place == "append":
    stopping(metrics_file.History, "append", 3)
elif place == "open":  # it has taken the run over, and has not yet looked at it
    stopping(LocalFiles, "replace", 1)
with open_trainer(config, directory, device="cpu", threads=1) as trainer:
    for report in trainer.events():
        pass
"""


_LONG = [pytest.param(place, marks=pytest.mark.chaos) for place in ("open", "append", "commit")]


@pytest.mark.fault(
    28, "a writer is stopped at five places and wakes up after another one ended the run"
)
@pytest.mark.parametrize("place", [*_LONG, "rename", "remove"])
def test_row_28_replaced_process_changes_nothing(tmp_path: Path, place: str) -> None:
    stale = _start(tmp_path, place)
    wait_until(lambda: psutil.Process(stale.pid).status() == psutil.STATUS_STOPPED)
    successor = _start(tmp_path, "nowhere")
    _, said = successor.communicate(timeout=scaled(120))
    assert successor.returncode == 0, said
    before = _content(tmp_path)
    os.kill(stale.pid, signal.SIGCONT)
    _, errors = stale.communicate(timeout=scaled(120))
    assert stale.returncode == 1
    assert "WriterReplaced: another process has taken over" in errors.splitlines()[-1]
    assert _content(tmp_path) == before
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert newest.epoch == 3
    steps = [row.step for row in read_rows(tmp_path)]
    assert steps == list(range(1, newest.step + 1))


def _start(directory: Path, place: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(directory), place],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _content(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
    }
