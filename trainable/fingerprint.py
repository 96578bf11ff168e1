"""Digests of a task's source files and data, and the comparison of two such summaries.

A resumed sweep compares them: trials of different code or data are not comparable.
What must not live here: the reaction to a difference.
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
_PIECE = 1 << 22
BUILT = "built.json"
"""The file in a run's directory that summarises what its task built at the start (`built`)."""
ARGUMENTS = "arguments"
"""The key in a summary (`built.py`) of the arguments of the task's constructor."""
COLLATED = "its collated batch"
"""The end of the keys for what a collate function returns."""
OPENED = "opened file"
"""The start of the keys for files that the task opened and did not name (`opened_files.py`). Such
a key is compared only if both summaries have it: the file may be a cache, which is opened only at
the first or only at later starts."""


def code_digests(task: str, *others: str) -> dict[str, str]:
    """Return the sha256 of each source file of a task, by path relative to the task's directory.

    These are the file of its module and, for a user's task, all loaded modules in the directory of
    its package (without a package: in the module's directory). Call it once the task has imported
    everything that it needs.

    Args:
        task: Its name in a spec. Its module must be imported already.
        others: Likewise the names of a user's optimizers and schedules, whose files belong to it.
    """
    found = _digests(task)
    for name in others:
        found = {**_digests(name), **found}
    return found


def changed_files(task: str, before: Mapping[str, str]) -> list[str]:
    """Return which of a task's files are not as they were.

    `before` may name more than source files that are loaded now: files that the task read, and
    those of other optimizers. These are read where they lie.

    Args:
        task: Its name in a spec. Its module must be imported already.
        before: Earlier digests, by path: of `code_digests`, and of `Task.files_read`.
    """
    now, root = code_digests(task), task_directory(task) or Path()
    for name in before.keys() - now.keys():
        place = next((one for one in (root / name, Path(name)) if one.is_file()), None)
        if place is not None:
            with place.open("rb") as file:
                now[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]


def _digests(task: str) -> dict[str, str]:
    file = _source(sys.modules[BUILT_IN.get(task, task).partition(":")[0]])
    if file is None:
        return {}  # a module without a source file, such as a compiled one
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
    """Return the directory of a user's task: of its outermost package, or of its module.

    None for a built-in task, for a module without a source file, and for one that is not imported.

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
    """Return one sha256 over the dtypes, shapes and values of tensors, in their order."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        bits = _bits(tensor.detach())
        for piece in bits.split(_PIECE):  # type: ignore[no-untyped-call]
            # A copy: numpy() forbids the owner of the memory to resize it from then on.
            digest.update(piece.clone().numpy().data)
    return digest.hexdigest()


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor's values in host memory; it may share the tensor's own."""
    import torch

    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.flatten().view(torch.uint8)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the keys under which two summaries differ by more than rounding."""
    compared = [
        key
        for key in {**before, **now}
        if not key.startswith(OPENED) or (key in before and key in now)
    ]
    return [key for key in compared if not _equal(before.get(key), now.get(key))]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return type(one) is type(other) and bool(one == other)


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    # Modules made at run time may name a file that does not exist.
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return Path(file).resolve() if Path(file).is_file() else None


def _lies_below(root: Path, path: Path) -> bool:
    return path.is_relative_to(root) and not FOREIGN & set(path.relative_to(root).parts)


def _is_library(module: ModuleType) -> bool:
    # This project's own packages never count as the user's code, even in its source tree.
    return module.__name__.partition(".")[0] in (
        "sweeps",
        "tracking",
        "trainable",
        "redaction",
        "__main__",
    )
