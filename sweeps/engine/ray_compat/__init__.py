"""The private parts of Ray that Gradsweep uses, and nothing else.

`environment` has the variables that Ray reads, `ray_internals` Ray's own processes and errors,
and `tune_internals` the controller and the trials of Ray Tune. Each private name and each patch
has one line that says why. `tests/contract/test_ray_compat.py` asserts what each of them relies
on, and `docs/internals/ray-compatibility.md` lists them.

Two files outside this package also use private parts of Ray, because they must not import it:
`worker_launcher`, which every worker runs before anything else, and
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
