"""What a task is made of, as digests: its source files and its data.

A sweep that goes on days later compares them: trials that trained other code or other data are not
comparable. What must not live here: what follows from a difference.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trainable.naming import BUILT_IN

if TYPE_CHECKING:
    from torch import Tensor

_FOREIGN = {"site-packages", "dist-packages"}


def code_digests(task: str) -> dict[str, str]:
    """Return the sha256 of a loaded task's source files, by path from where they lie.

    These are the file of its module and, for a user's task, every loaded module below the
    directory of its package, or beside it where there is no package. Call it once everything is
    imported that the task needs.

    Args:
        task: Its name in a spec; its module is imported already.
    """
    name = BUILT_IN.get(task, task).partition(":")[0]
    file = _source(sys.modules[name])
    if file is None:
        return {}  # a module without a source file, such as one that was compiled
    if task in BUILT_IN:
        root, sources = file.parent, {file}
    else:
        root = (_source(sys.modules[name.partition(".")[0]]) or file).parent
        loaded = [m for m in list(sys.modules.values()) if not _is_library(m)]
        sources = {path for path in map(_source, loaded) if path and _lies_below(root, path)}
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(sources)
    }


def tensor_digest(*tensors: Tensor) -> str:
    """Return one sha256 over the kinds, shapes and values of tensors, in their order."""
    import torch

    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        whole = tensor.detach().cpu().contiguous()
        digest.update(whole.flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _source(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    # Some modules are made up at run time and name a file that there is not.
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    return Path(file).resolve() if Path(file).is_file() else None


def _lies_below(root: Path, path: Path) -> bool:
    return path.is_relative_to(root) and not _FOREIGN & set(path.relative_to(root).parts)


def _is_library(module: ModuleType) -> bool:
    # Where someone works in this project's own tree, it is a library there as anywhere else.
    return module.__name__.partition(".")[0] in ("sweeps", "tracking", "trainable", "__main__")
