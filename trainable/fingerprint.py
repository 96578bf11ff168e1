"""What a task is made of, as digests: its source files and its data. How summaries are compared.

A sweep that goes on days later compares them: trials that trained other code or other data are not
comparable. What must not live here: what follows from a difference.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainable.task_registry import BUILT_IN

if TYPE_CHECKING:
    from torch import Tensor

FOREIGN = {"site-packages", "dist-packages"}
"""Directories of installed packages."""
_RELATIVE, _ABSOLUTE = 1e-3, 1e-5
ARGUMENTS = "arguments"
"""The key of a summary (`built.py`) that says with which arguments its task was made."""
COLLATED = "its collated batch"
"""Ends the keys for what a collate function returns."""
OPENED = "opened file"
"""Begins the keys for files that were not named (`opened_files.py`). One that is opened the first
time alone, or from the second on, may be a cache: it is compared where both summaries have it."""


def code_digests(task: str) -> dict[str, str]:
    """Return the sha256 of a loaded task's source files, by path from where they lie.

    These are the file of its module and, for a user's task, every loaded module below the
    directory of its package, or beside it where there is no package. Call it once everything is
    imported that the task needs.

    Args:
        task: Its name in a spec; its module is imported already.
    """
    file = _source(sys.modules[BUILT_IN.get(task, task).partition(":")[0]])
    if file is None:
        return {}  # a module without a source file, such as one that was compiled
    root = task_directory(task)
    if root is None:
        root, sources = file.parent, {file}
    else:
        loaded = [m for m in list(sys.modules.values()) if not _is_library(m)]
        sources = {path for path in map(_source, loaded) if path and _lies_below(root, path)}
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(sources)
    }


def task_directory(task: str) -> Path | None:
    """Return where a user's task lies: the directory of its outermost package, or its module's;
    None for a built-in task, and for a module without a source file or that is not imported.

    Args:
        task: Its name in a spec.
    """
    name = task.partition(":")[0]
    module, package = sys.modules.get(name), sys.modules.get(name.partition(".")[0])
    if task in BUILT_IN or module is None or package is None:
        return None
    file = _source(module)
    return file and (_source(package) or file).parent


def tensor_digest(*tensors: Tensor) -> str:
    """Return one sha256 over the kinds, shapes and values of tensors, in their order."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        whole = tensor.detach().cpu().contiguous()
        digest.update(whole.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys under which two summaries differ by more than rounding."""
    # Earlier releases looked at no batches, and at no items of loader processes.
    keys = [key for key in {**before, **now} if key in before or not _is_of_items(key)]
    compared = [
        key for key in keys if not key.startswith(OPENED) or (key in before and key in now)
    ]
    return [key for key in compared if not _alike(before.get(key), now.get(key))]


def _is_of_items(key: str) -> bool:
    return key.startswith(("train[", "val[")) or key.endswith(COLLATED)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return type(one) is type(other) and bool(one == other)


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    # Some modules are made up at run time and name a file that there is not.
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return Path(file).resolve() if Path(file).is_file() else None


def _lies_below(root: Path, path: Path) -> bool:
    return path.is_relative_to(root) and not FOREIGN & set(path.relative_to(root).parts)


def _is_library(module: ModuleType) -> bool:
    # Where someone works in this project's own tree, it is a library there as anywhere else.
    return module.__name__.partition(".")[0] in (
        "sweeps",
        "tracking",
        "trainable",
        "redaction",
        "__main__",
    )
