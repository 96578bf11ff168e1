"""When the memory does not suffice: how that is recognised, and how the same step takes less.

What must not live here: deciding whether a run goes on (its owner's policy).
"""

from __future__ import annotations

import gc

from trainable.config import TrainConfig

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
