"""P1: how soon `sweep run digits` shows a finished epoch, and how soon it is done.

The peer is a script written by hand that imports torch, builds the model and trains one epoch
(`memory_child.py`). What must not live here: sweeps against other tuners (`sweeping.py`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.bench.table import Goal, Result, alone, paired

_SWEEP = Path(sys.executable).with_name("sweep")
_DIGITS = Path(__file__).parents[2] / "sweeps" / "examples" / "digits.yaml"


class _Times(NamedTuple):
    """Seconds since the command began."""

    first_epoch: float
    last_trial: float
    prompt: float


def first(repeats: int) -> list[Result]:
    """The README's sweep, whole, and the bare script, in turn."""
    sweeps, scripts = [], []
    _script()  # once without being counted: it reads torch from the disk
    for _ in range(repeats):
        sweeps.append(_sweep())
        scripts.append(_script())
    return [
        paired(
            "P1 first finished epoch / a bare script's",
            [times.first_epoch for times in sweeps],
            scripts,
            "s",
            Goal("ratio", 1.5),
        ),
        alone(
            "P1 last trial's end to the prompt",
            [times.prompt - times.last_trial for times in sweeps],
            "s",
            Goal("ours", 3.0),
        ),
        alone("P1 sweep run digits", [times.prompt for times in sweeps], "s", Goal("ours", 20.0)),
    ]


def _sweep() -> _Times:
    first_epoch = last_trial = 0.0
    with tempfile.TemporaryDirectory(prefix="first-") as root:
        started = time.perf_counter()
        command = [str(_SWEEP), "run", str(_DIGITS), "--root", root]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("trial "):
                    last_trial = time.perf_counter() - started
                if not first_epoch and " epoch 1/" in line:
                    first_epoch = last_trial
        prompt = time.perf_counter() - started
        assert process.returncode == 0
        assert first_epoch, "no line says that an epoch is finished"
    return _Times(first_epoch, last_trial, prompt)


def _script() -> float:
    started = time.perf_counter()
    command = [sys.executable, "-m", "tests.bench.memory_child", "bare, one epoch"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started
