"""Seeds derived from names and numbers, and the random generators they start.

The same parts give the same seed on every machine and in every process. torch and NumPy are
imported inside the functions that need them, because the command line derives trial seeds without
either. What must not live here: capturing generators into a checkpoint (see `state.py`).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SEED_BITS = (
    63  # torch takes 64-bit seeds; one bit less stays a positive signed integer everywhere
)
_NUMPY_SEEDS = 2**32  # NumPy's legacy generator takes 32-bit seeds


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part and on nothing else.

    Args:
        parts: What the seed belongs to, such as `derive_seed(sweep_seed, trial_number)` or
            `derive_seed(seed, "epoch", 3)`.
    """
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def set_seed(seed: int) -> None:
    """Seed Python, NumPy, torch on the CPU and torch on every accelerator."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU; the generators of accelerators stay untouched."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)


class HostRandomness:
    """The host's generators (Python, NumPy, torch on the CPU) as they are now."""

    def __init__(self) -> None:
        import numpy
        import torch

        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state()
        self._torch = torch.get_rng_state()

    def moved(self) -> bool:
        """Return whether any of them has moved since."""
        import torch

        now = HostRandomness()
        return not (
            torch.equal(self._torch, now._torch)
            and self._python == now._python
            and bool((self._numpy[1] == now._numpy[1]).all())
            and self._numpy[2:] == now._numpy[2:]
        )

    def restore(self) -> None:
        """Put them back."""
        import numpy
        import torch

        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed every generator, and put all of them back as they were on leaving; None: leave them."""
    import torch

    if seed is None:
        yield
        return
    # Host state of each device's generator: no device synchronisation.
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with isolated_host_randomness():
        set_seed(seed)
        try:
            yield
        finally:
            if devices:
                torch.cuda.set_rng_state_all(devices)


@contextmanager
def isolated_host_randomness() -> Iterator[None]:
    """Put the host's generators back as they were on leaving."""
    before = HostRandomness()
    try:
        yield
    finally:
        before.restore()


def set_determinism(deterministic: bool) -> None:
    """Make torch deterministic, or let it be fast, for the whole process.

    Deterministic means: an operation without a deterministic implementation is an error rather
    than a warning, because a warning would leave the promise of bit-exact resumption broken in
    silence. cuDNN's benchmark is then off, since its choice of algorithm changes from run to run.
    """
    import torch
    import torch.utils.deterministic

    if deterministic:
        # Read when cuBLAS makes its handle: it must be set before the first matrix product on a
        # GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # The debug mode is the same switch as use_deterministic_algorithms without the import of the
    # compiler (three seconds of every trial's start).
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Filling fresh memory costs a pass over it and only matters to code that reads what it never
    # wrote.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic
