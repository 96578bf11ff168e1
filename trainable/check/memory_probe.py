"""Measure how much GPU memory training takes, by two steps and one evaluation batch.

What must not live here: what follows from it for trials that share a GPU
(`sweeps.engine.resources`).
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import OutOfMemory
from trainable.loop import Trainer
from trainable.memory import CONTEXT_BYTES, release_memory
from trainable.precision import find_device
from trainable.watch.diagnostics import memory_of_process, open_gpu


def measure_step(config: TrialConfig, device: torch.device | None = None) -> dict[str, int | str]:
    """Train two steps, evaluate one batch, and return the CUDA memory that this took.

    The model is not compiled: that would take minutes and save no memory. No loader processes are
    started, since they take no GPU memory. The process may use the whole device meanwhile.
    """
    device = device or find_device(None)
    if device.type != "cuda":
        return {"failed": "found no CUDA device that torch can use"}
    # Before the statistics: this starts CUDA, without which there are none to reset.
    total = torch.cuda.get_device_properties(device).total_memory
    release_memory()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        run_two_steps(config, device)
        torch.cuda.synchronize(device)  # device synchronisation: no kernel runs after this
        outside = _outside(device)
    except OutOfMemory:
        return {"failed": "ran out of memory"}
    # A user's code may raise anything; the trials report it.
    except Exception as error:
        return {"failed": f"raised {type(error).__name__}"}
    peak = torch.cuda.max_memory_reserved(device)
    return {"peak": peak, "outside": outside, "total": total}


def run_two_steps(config: TrialConfig, device: torch.device) -> None:
    """Take the first two steps of a run and evaluate its first batch, as a trial does.

    The optimizer makes its state at the end of the first step. Only the second step has weights,
    gradients, that state and activations at once.
    """
    config = config.model_copy(update={"train": config.train.in_one_process()})
    with TemporaryDirectory(prefix="memory-") as name:
        trainer = open_trainer(config, Path(name), device=str(device))
        assert isinstance(trainer, Trainer)  # a custom loop is not measured
        with trainer:
            trainer.shorten(2, 2)
            trainer.store.save = lambda *_, **__: None  # type: ignore[method-assign]
            if trainer._step.average is not None:
                trainer._step.average.count = 1  # whatever its start: evaluation copies weights
            for _ in trainer.events():
                pass


def _outside(device: torch.device) -> int:
    """Return the bytes that this process takes of a CUDA device besides torch's allocator."""
    reserved = torch.cuda.memory_reserved(device)
    gpu = open_gpu(device)
    if gpu is not None and (used := memory_of_process(gpu)) is not None:
        return max(0, used - reserved)
    # Without NVML, all memory outside this process' allocator is an upper bound.
    free, total = torch.cuda.mem_get_info(device)
    return min(max(0, total - free - reserved), CONTEXT_BYTES)
