"""P12: trials packed on one GPU, against one at a time. Without a GPU there is nothing to measure.

What must not live here: what a trial does meanwhile (`packing_child.py`). Trials fused into one
model are not part of this project.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from typing import IO

from sweeps.engine.resources import Machine
from tests.bench.table import Result, interleave, not_measured

_PACKED = (4, 8, 16)


def packing(repeats: int) -> list[Result]:
    """Seconds for each trial's epochs when 4, 8 and 16 share a GPU, and when it has one alone.

    A ratio of 1 / n is what n trials would reach that never waited for each other.
    """
    if not Machine.probe().gpus:
        return [not_measured(f"P12 {n} packed trials", "needs a GPU") for n in _PACKED]
    return measure(_PACKED, "cuda:0", repeats)


def measure(packed: tuple[int, ...], device: str, repeats: int) -> list[Result]:
    """Measure on a device; those who wait for their turn hold their memory and compute nothing."""
    results = []
    with ExitStack() as stack:
        alone = _Trials(stack, 1, device)
        for count in packed:
            with ExitStack() as these:
                results += interleave(
                    f"P12 {count} packed trials, for each",
                    _Trials(these, count, device),
                    {"one at a time": alone},
                    unit="s/trial",
                    repeats=repeats,
                )
    return results


class _Trials:
    """Trials in processes of their own; a call has them train some epochs together."""

    def __init__(self, stack: ExitStack, count: int, device: str) -> None:
        command = [sys.executable, "-m", "tests.bench.packing_child", str(1 / count), device]
        self._pipes: list[tuple[IO[str], IO[str]]] = []
        for _ in range(count):
            child = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            assert child.stdin is not None
            assert child.stdout is not None
            self._pipes.append((child.stdin, child.stdout))
        for _, answers in self._pipes:
            assert answers.readline() == "ready\n"

    def __call__(self) -> float:
        for requests, _ in self._pipes:
            print("go", file=requests, flush=True)
        slowest = max(float(answers.readline()) for _, answers in self._pipes)
        return slowest / len(self._pipes)
