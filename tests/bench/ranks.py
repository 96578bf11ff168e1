"""P13: a step of two ranks, against a script for `torchrun` with DistributedDataParallel.

Both sides have two processes of one thread each, on one machine. Ours logs loss, learning rate and
gradient norm of every step and stands ready to checkpoint, as in `step`. What must not live here:
what is trained (`ranks_problems.py`), and the script (`ranks_ddp.py`).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from sweeps.engine.resources import Machine
from tests.bench.ranks_problems import EPOCHS, LR, MAX_NORM, PROBLEMS, RANKS, RanksProblem
from tests.bench.table import Goal, Result, Sample, interleave, not_measured
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.processes.local_ranks import local_ranks

_WARM_UP = 2
_GPU_ROWS = ("step over NCCL", "the same bits in every run over NCCL")


def ranks(repeats: int) -> list[Result]:
    """Epochs of each problem, the sides in turn; in milliseconds for one step."""
    results = []
    for name, problem in PROBLEMS.items():
        with ExitStack() as stack:
            ours = _Ours(stack, problem)
            sides = {
                "torchrun, DDP": _Torchrun(stack, name, problem, "loader"),
                "torchrun, DDP, indexed": _Torchrun(stack, name, problem, "indexed"),
            }
            everyone: list[Sample] = [ours, *sides.values()]
            for side in everyone * _WARM_UP:
                side()
            results += interleave(
                f"P13 {name}, {RANKS} ranks",
                ours,
                {**sides},
                unit="ms/step",
                goals={"torchrun, DDP": Goal("ratio", problem.at_most)},
                repeats=repeats,
            )
    gpus = len(Machine.probe().gpus)
    if gpus < RANKS:
        why = f"needs {RANKS} GPUs, there {'is' if gpus == 1 else 'are'} {gpus}"
        results += [not_measured(f"P13 {row}", why) for row in _GPU_ROWS]
    return results


class _Ours:
    """Our trainer on two ranks, an epoch per call; the further rank waits in between."""

    def __init__(self, stack: ExitStack, problem: RanksProblem) -> None:
        self._problem = problem
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = TrialConfig.model_validate(
            {
                "task": {
                    "name": "tests.bench.ranks_problems:GivenDigits",
                    **problem.arguments,
                },
                "metric": "val/loss",
                "mode": "min",
                "budget": {"epochs": EPOCHS},
                "checkpoint": {"every": f"{EPOCHS} epochs"},
                "workers": RANKS,
                "train": {
                    "batch_size": problem.batch_size,
                    "optimizer": {"lr": LR},
                    "schedule": {"name": "onecycle", "warmup": 0.3},
                    "clip": {"max_norm": MAX_NORM},
                    "layer_norms_every": 10,
                    "precision": "fp32",
                },
            }
        )
        group = stack.enter_context(local_ranks(config, directory, device="cpu", threads=1))
        trainer = open_trainer(config, directory, device="cpu", threads=1, ranks=group)
        stack.callback(trainer.close)
        self._events = trainer.events()

    def __call__(self) -> float:
        started = time.perf_counter()
        next(self._events)
        return (time.perf_counter() - started) * 1e3 / self._problem.steps


class _Torchrun:
    """The script, an epoch per call; its ranks wait in between."""

    def __init__(self, stack: ExitStack, name: str, problem: RanksProblem, batches: str) -> None:
        self._problem = problem
        self._process = stack.enter_context(
            subprocess.Popen(
                [
                    sys.executable,
                    *("-m", "torch.distributed.run", "--standalone"),
                    *("--nproc-per-node", str(RANKS)),
                    *("-m", "tests.bench.ranks_ddp", name, batches),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def __call__(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline()) * 1e3 / self._problem.steps
