"""What a training process takes of a GPU, measured: two steps and one batch of the evaluation.

What must not live here: what follows from it for trials that share a GPU
(`sweeps.engine.resources`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from itertools import chain, islice

import torch

from trainable.build import build_parts, build_step
from trainable.config import TrialConfig
from trainable.data import Source
from trainable.errors import OutOfMemory
from trainable.memory import CONTEXT_BYTES, release_memory
from trainable.step import Step, translate_torch_errors


def measure_step(config: TrialConfig, device: torch.device) -> dict[str, int | str]:
    """Train two steps, evaluate one batch, and say what that took of a CUDA device.

    Nothing is compiled for it, which takes minutes and no less memory, and no loader process is
    started, which takes none of the device. The process may take the whole device meanwhile.

    Returns:
        In bytes: `peak`, the most that torch's allocator held; `outside`, what the process takes
        beside it; `total`, the device's memory. Or `failed`: in a few words why it is not known.
    """
    if device.type != "cuda":
        return {"failed": "found no CUDA device that torch can use"}
    release_memory()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        rehearse(config, device)
        torch.cuda.synchronize(device)  # device synchronisation: what still runs allocates nothing
        outside = _outside(device)
    except OutOfMemory:
        return {"failed": "ran out of memory"}
    # A user's code may raise anything; the trials then say what, each in its own words.
    except Exception as error:
        return {"failed": f"raised {type(error).__name__}"}
    peak = torch.cuda.max_memory_reserved(device)
    total = torch.cuda.get_device_properties(device).total_memory
    return {"peak": peak, "outside": outside, "total": total}


def rehearse(config: TrialConfig, device: torch.device) -> None:
    """Take the first two steps of a run and evaluate its first batch, as a trial would.

    Two steps, because the optimizer makes its state at the end of the first: only the second has
    weights, gradients, that state and activations at once.

    Raises:
        OutOfMemory: The device's memory did not suffice.
    """
    loader = config.train.loader.model_copy(update={"num_workers": 0})
    train = config.train.model_copy(update={"compile": False, "loader": loader})
    with translate_torch_errors(device):
        parts = build_parts(config.model_copy(update={"train": train}), device=device)
        with contextlib.closing(parts.train), contextlib.closing(parts.val):
            step = build_step(parts, train)
            windows = chain(parts.train.windows(0), parts.train.windows(1))
            for number, window in enumerate(islice(windows, 2), start=1):
                step(window, number)
            _evaluate(step, parts.val)


def _evaluate(step: Step, source: Source) -> None:
    batches: Iterator[object] = (batch for window in source.windows(0) for batch in window)
    step.model.eval()
    with torch.no_grad(), step.precision.autocast():
        step.task.evaluate(step.model, islice(batches, 1))


def _outside(device: torch.device) -> int:
    """Return what this process takes of a CUDA device beside torch's allocator, in bytes.

    The driver knows it of each process; where it does not say, all that nobody's tensors of this
    process take is an upper bound, which counts only as far as a context is known to go.
    """
    reserved = torch.cuda.memory_reserved(device)
    used = _used_by_this_process(device)
    if used is not None:
        return max(0, used - reserved)
    free, total = torch.cuda.mem_get_info(device)
    return min(max(0, total - free - reserved), CONTEXT_BYTES)


def _used_by_this_process(device: torch.device) -> int | None:
    """Return what the driver says that this process takes of a device; None where it does not
    say: without its library, or in a container with process numbers of its own.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError:
        pass  # a part of a GPU, or a driver that does not tell
    finally:
        pynvml.nvmlShutdown()
    return None
