"""Derive seeds from names and numbers; seed, save and restore the random generators.

The same parts give the same seed on every machine and in every process. Functions import torch
and NumPy themselves: the command line derives trial seeds without loading either. What must not
live here: saving generators in a checkpoint (see `train_state.py`).
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SEED_BITS = 63  # torch accepts 64 bits; 63 fit into a signed integer of any database
_DEPTH = 6
"""So deep are generators looked for in a sampler or a stream."""
_MANY = 100
"""A collection with more members has samples, not the parts of a sampler or a stream."""
_NUMPY_SEEDS = 2**32  # NumPy's legacy generator accepts 32 bits


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2**63) that depends on every part and on nothing else."""
    digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def set_seed(seed: int) -> None:
    """Seed Python, NumPy, torch on the CPU and torch on every accelerator."""
    import torch

    seed_host(seed)
    if torch.accelerator.is_available():  # else torch takes 0.4 ms to keep the seed for one
        torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python, NumPy and torch on the CPU; the generators of accelerators stay untouched."""
    import numpy
    import torch

    random.seed(seed)
    numpy.random.seed(seed % _NUMPY_SEEDS)
    torch.default_generator.manual_seed(seed)


def reseed() -> None:
    """Seed the host's generators at random: forks would otherwise share their state."""
    import numpy
    import torch

    random.seed()
    numpy.random.seed()
    torch.default_generator.seed()


class HostRngState:
    """The current state of the host's generators: Python, NumPy, torch on the CPU."""

    def __init__(self) -> None:
        import numpy
        import torch

        self._python = random.getstate()
        self._numpy: Any = numpy.random.get_state()
        self._torch = torch.get_rng_state()

    def has_changed(self) -> bool:
        """Return whether a generator has been used or seeded since."""
        import torch

        now = HostRngState()
        return not (
            torch.equal(self._torch, now._torch)
            and self._python == now._python
            and bool((self._numpy[1] == now._numpy[1]).all())
            and self._numpy[2:] == now._numpy[2:]
        )

    def restore(self) -> None:
        """Set the generators back to this state."""
        import numpy
        import torch

        random.setstate(self._python)
        numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)


@contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """Seed every generator and restore all of them on exit; with None, do nothing."""
    import torch

    if seed is None:
        yield
        return
    # The state of a device's generator is in host memory: no device synchronisation.
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with preserved_host_rng():
        set_seed(seed)
        try:
            yield
        finally:
            if devices:
                torch.cuda.set_rng_state_all(devices)


@contextmanager
def preserved_host_rng() -> Iterator[None]:
    """Restore the host's generators on exit."""
    before = HostRngState()
    try:
        yield
    finally:
        before.restore()


def set_determinism(deterministic: bool) -> None:
    """Set torch to deterministic or to fast algorithms, for the whole process.

    With `deterministic`, an operation without a deterministic implementation raises: after a mere
    warning, a resumed run would silently differ in its bits. cuDNN's benchmark is off as well,
    because its choice of algorithm changes from run to run.
    """
    import torch
    import torch.utils.deterministic

    if deterministic:
        # cuBLAS reads it when it makes its handle, before the first matrix product on a GPU.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # use_deterministic_algorithms sets the same mode but imports the compiler: three seconds at
    # the start of each trial.
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # Filling new memory costs a pass over it and matters only to code that reads uninitialised
    # memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.deterministic = deterministic
    torch.backends.cudnn.benchmark = not deterministic


def seed_generators_of(value: object, seed: int, *, in_datasets: bool = False) -> None:
    """Seed every generator in an object's attributes, and in those of what it consists of.

    The seed of each depends on the shortest way to it, not on what else the object holds now.
    """
    for path, generator in _generators_of(value, in_datasets):
        _seed_generator(generator, derive_seed(seed, "own", path))


def _generators_of(root: object, in_datasets: bool) -> Iterator[tuple[str, Any]]:
    """Yield generators with their paths; long collections are left out."""
    import numpy
    import torch
    from torch.utils.data import Dataset, IterableDataset

    kinds = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    seen: set[int] = set()
    level: list[tuple[str, Any]] = [("", root)]
    for _ in range(_DEPTH):
        below: list[tuple[str, Any]] = []
        for path, value in level:
            if id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, kinds):
                yield path, value
            elif (
                in_datasets or not isinstance(value, Dataset) or isinstance(value, IterableDataset)
            ):
                below += [(f"{path}.{name}", part) for name, part in _parts_of(value)]
        level = below


def _parts_of(value: object) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        parts = [(str(index), part) for index, part in enumerate(value[: _MANY + 1])]
    elif isinstance(value, dict):
        parts = [(repr(key), part) for key, part in value.items()]
    elif isinstance(value, type):
        return []
    else:
        parts = sorted(getattr(value, "__dict__", {}).items())
        if isinstance(value, types.MethodType):
            parts.append(("self", value.__self__))
        elif isinstance(value, functools.partial):
            parts += [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    return parts if len(parts) <= _MANY else []


def _seed_generator(generator: Any, seed: int) -> None:
    import numpy
    import torch

    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % _NUMPY_SEEDS)
