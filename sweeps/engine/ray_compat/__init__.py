"""The private parts of Ray that Gradsweep uses, each with a line that says why.

`tests/contract/test_ray_compat.py` asserts what they rely on,
`docs/internals/ray-compatibility.md` lists them. Two more files use private parts, because they
must not import this package: `worker_launcher` (every worker runs it first) and
`trainable.adapters.ray_ranks`. What must not live here: a decision about trials or sweeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, instead: Any) -> Iterator[None]:
    """Replace one attribute of a module or class while the context is open."""
    original = getattr(owner, name)
    setattr(owner, name, instead)
    try:
        yield
    finally:
        setattr(owner, name, original)
