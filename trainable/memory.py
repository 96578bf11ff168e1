"""When the memory does not suffice: how that is recognised, how the same step takes less, and what
a process may take of a GPU that it shares.

What must not live here: deciding whether a run goes on (its owner's policy), and how large a share
is (`sweeps.engine.resources`).
"""

from __future__ import annotations

import gc

from trainable.config import TrainConfig

CONTEXT_BYTES = 768 * 2**20
"""What a process is assumed to take of a GPU beside its tensors: the CUDA context, and kernels,
which are loaded on first use."""

# What is no `torch.OutOfMemoryError` says so in words: the CPU's allocator, CUDA outside of
# torch's own allocator, and its linear algebra when the workspace cannot be had.
_WORDS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def is_out_of_memory(problem: BaseException) -> bool:
    """Whether an exception says that memory could not be had."""
    import torch

    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(problem, RuntimeError) and any(word in str(problem) for word in _WORDS)


def finer_accumulation(train: TrainConfig) -> int | None:
    """Return the accumulation with half the micro-batch, or the nearest smaller whole one.

    The step stays the same sum over the same samples. None when a micro-batch is one sample
    already.
    """
    size = train.batch_size
    finer = (n for n in range(2 * train.accumulation, size + 1) if size % n == 0)
    return next(finer, None)


def release_memory() -> None:
    """Give back what nothing refers to any more, also what torch keeps for later."""
    import torch

    gc.collect()  # a failed step's frames and graph refer to each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tensor_fraction(share: float, total: int) -> float:
    """Return the part of a GPU's memory that the tensors of a process with a share of it may take.

    torch caps what its own allocator takes, and the context comes on top of that: without room
    for it, several processes that all keep to their cap would fill the GPU.

    Args:
        share: Share of the GPU in (0, 1]; 1: nobody else is on it, and nothing is capped.
        total: The GPU's memory in bytes.
    """
    if share == 1:
        return 1.0
    return max(share - CONTEXT_BYTES / total, share / 2)
