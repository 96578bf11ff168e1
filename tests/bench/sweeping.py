"""P1, P2: a whole sweep, from the command to its last line, against other ways of making it.

Everything is included on both sides: starting, importing, searching, training, recording. What
must not live here: the other ways (`stock.py`), what a trial costs the driver (`control.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.stock import BATCH_SIZE, EPOCHS, WIDTH
from tests.bench.table import Goal, Result, interleave, size

_SWEEP = Path(sys.executable).with_name("sweep")
_COLD, _WARM = "stock Ray Tune", "stock Ray Tune, reuse_actors"
_BARE = "the least that Ray Tune takes"
"""Warm actors and a search that is known beforehand; nothing is recorded."""
_PLAIN = "plain Optuna, a process per CPU"

_SPEC = f"""
name: bench
task: {{name: digits, model: mlp, width: {WIDTH}}}
metric: val/loss
mode: min
trials: 1
budget: {{epochs: {EPOCHS}}}
space:
  train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-1]}}
  train.schedule.warmup: {{uniform: [0.0, 0.3]}}
  train.clip.max_norm: {{loguniform: [0.1, 10]}}
search: {{sampler: tpe}}
early_stopping: {{scheduler: none}}
resources: {{cpu: 1}}
train: {{batch_size: {BATCH_SIZE}, schedule: {{name: cosine}}}}
"""


def against_stock(repeats: int) -> list[Result]:
    """Our sweep against Ray Tune with OptunaSearch and MLflowLoggerCallback."""
    trials = size(64, 4)
    return interleave(
        f"P1 sweep of {trials} digits trials",
        lambda: _ours(trials),
        {
            _COLD: lambda: _peer("tune", trials),
            _WARM: lambda: _peer("tune-warm", trials),
            _BARE: lambda: _peer("tune-bare", trials),
        },
        unit="s",
        goals={_COLD: Goal("ratio", 1 / 15), _WARM: Goal("ratio", 1 / 3)},
        repeats=repeats,
    )


def against_plain(repeats: int) -> list[Result]:
    """Our sweep against Optuna alone, which neither records nor saves anything."""
    trials = size(256, 8)
    return interleave(
        f"P2 sweep of {trials} digits trials",
        lambda: _ours(trials),
        {_PLAIN: lambda: _peer("optuna", trials), _BARE: lambda: _peer("tune-bare", trials)},
        unit="s",
        goals={_PLAIN: Goal("ratio", 1.0)},
        repeats=repeats,
    )


def _ours(trials: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        spec = Path(directory, "bench.yaml")
        spec.write_text(_SPEC)
        options = ["-s", f"trials={trials}", "--root", directory]
        return _wall([str(_SWEEP), "run", str(spec), *options], directory)


def _peer(kind: str, trials: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        script = [sys.executable, "-m", "tests.bench.stock", kind, str(trials), directory]
        return _wall(script, os.getcwd())


def _wall(command: list[str], directory: str) -> float:
    started = time.perf_counter()
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return time.perf_counter() - started
