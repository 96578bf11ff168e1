"""Recognise out-of-memory errors, take the same step with less memory, and cap a shared GPU.

What must not live here: whether a run is retried (the caller's policy), and how large a share of a
GPU is (`sweeps.engine.resources`).
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainable.config import TrainConfig

CONTEXT_BYTES = 768 * 2**20
"""Assumed GPU memory of a process besides its tensors: the CUDA context and loaded kernels."""

# Parts of the messages of errors that are no `torch.OutOfMemoryError`: of the CPU's allocator, of
# CUDA outside torch's allocator, and of cuBLAS without a workspace.
_WORDS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception means that memory could not be allocated."""
    import torch

    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in _WORDS)


def finer_accumulation(train: TrainConfig, workers: int = 1) -> int | None:
    """Return the accumulation for half the micro-batch size, or the next smaller divisor.

    A step remains the same sum over the same samples. None if a process already takes one sample
    at a time.
    """
    if train.micro_batch_size <= workers:
        return None
    size = train.batch_size
    finer = (n for n in range(2 * train.accumulation, size + 1) if size % n == 0)
    return next(finer, None)


def release_memory() -> None:
    """Free unreferenced objects and the memory that torch's allocator caches."""
    import torch

    gc.collect()  # the frames and graph of a failed step form reference cycles
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tensor_fraction(share: float, total: int) -> float:
    """Return the fraction of a GPU's memory for the tensors of a process with a share of the GPU.

    torch caps only its own allocator; the CUDA context comes on top. Without space for it, several
    processes within their caps could fill the GPU.
    """
    if share == 1:
        return 1.0
    return max(share - CONTEXT_BYTES / total, share / 2)
