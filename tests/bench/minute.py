"""P2: trials of about a minute, everything included, against the same trainings by a bare loop.

    python -m tests.bench.minute TRIALS EPOCHS

is one of the two processes of the bare side: it imports torch once, and trains its share. What
must not live here: trials so short that they only show what a sweep costs (`sweeping.py`).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.bench.table import Goal, Result, alone, paired, size
from trainable.process_start import adopt_orphans

_SWEEP = Path(sys.executable).with_name("sweep")
_AT_ONCE = 2
_TRIALS, _SECONDS = 16, 30
_FEW = _AT_ONCE
"""Trials of the sweep that trains as much in fewer trials: what it takes less is not training."""
_BATCH_SIZE, _LR = 16, 1e-3
_SPEC = f"""
name: minute
task: {{name: digits, model: cnn}}
metric: val/loss
mode: min
concurrency: {_AT_ONCE}
space:
  train.optimizer.lr: {{loguniform: [1.0e-4, 1.0e-2]}}
resources: {{cpu: 1, gpu: 0}}
early_stopping: {{scheduler: none}}
train: {{batch_size: {_BATCH_SIZE}, precision: fp32}}
"""


class _Cost(NamedTuple):
    wall: float
    cpu: float


def minute(repeats: int) -> list[Result]:
    """The time of a sweep, and the CPU time beside training that each further trial takes."""
    trials, seconds = size(_TRIALS, 4), size(_SECONDS, 1)
    epochs = max(4, round(seconds / _epoch_seconds()))
    ours, bare, beside = [], [], []
    for _ in range(repeats):
        ours.append(many := _sweep(trials, epochs))
        bare.append(_bare(trials, epochs))
        few = _sweep(_FEW, epochs * trials // _FEW)
        beside.append((many.cpu - few.cpu) / (trials - _FEW))
    walls, peers = ([one.wall for one in side] for side in (ours, bare))
    row = f"P2 {trials} trials of {seconds} s, {_AT_ONCE} at a time"
    return [
        paired(f"{row} / a bare loop", walls, peers, "s", Goal("ratio", 1.03)),
        alone(f"{row}: CPU beside training, a trial", beside, "s", Goal("ours", 0.15)),
    ]


def _sweep(trials: int, epochs: int) -> _Cost:
    with tempfile.TemporaryDirectory(prefix="minute-") as root:
        spec = Path(root, "minute.yaml")
        spec.write_text(f"{_SPEC}trials: {trials}\nbudget: {{epochs: {epochs}}}\n")
        return _cost([[str(_SWEEP), "run", str(spec), "--root", root]])


def _bare(trials: int, epochs: int) -> _Cost:
    shares = [trials // _AT_ONCE + (n < trials % _AT_ONCE) for n in range(_AT_ONCE)]
    script = [sys.executable, "-m", "tests.bench.minute"]
    return _cost([[*script, str(share), str(epochs)] for share in shares])


def _cost(commands: Sequence[Sequence[str]]) -> _Cost:
    """Run commands at once, and add up the CPU time of all their descendants."""
    adopt_orphans()  # else nobody counts their time
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        running = [
            subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            for command in commands
        ]
        codes = [one.wait() for one in running]
        wall = time.perf_counter() - started
        said.seek(0)
        assert not any(codes), said.read()[-2000:]
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return _Cost(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _epoch_seconds() -> float:
    """Return how long an epoch of the bare loop takes while as many train as later."""
    few, more = (_bare(_AT_ONCE, epochs).wall for epochs in (2, 2 + 8))
    return (more - few) / 8


def _train(epochs: int) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from trainable.find_task import load_task

    torch.set_num_threads(1)
    task = load_task("digits", {"model": "cnn"})
    data, model = task.build_data(), task.build_model()
    (inputs, targets), (val_inputs, val_targets) = data.train, data.val  # type: ignore[misc]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    for _ in range(epochs):
        model.train()
        for index in torch.randperm(len(inputs)).split(_BATCH_SIZE):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[index]), targets[index])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()
        model.eval()
        with torch.no_grad():
            cross_entropy(model(val_inputs), val_targets).item()


if __name__ == "__main__":
    for _ in range(int(sys.argv[1])):
        _train(int(sys.argv[2]))
