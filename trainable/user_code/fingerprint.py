"""Digests of a task's source files, of its data, and of the files that it opens; their comparison.

A resumed sweep compares them: trials of different code or data are not comparable.
What must not live here: the reaction to a difference.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainable.user_code.task_import import BUILT_IN

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
"""The start of the keys for files that the task opened and did not name. Such
a key is compared only if both summaries have it: the file may be a cache, which is opened only at
the first or only at later starts."""


def code_digests(task: str, *others: str) -> dict[str, str]:
    """Return the sha256 of each source file of a task, by path relative to the task's directory.

    For a user's task these are all loaded modules below that directory: call it once the task has
    imported everything that it needs.
    """
    found = _digests(task)
    for name in others:
        found = {**_digests(name), **found}
    return found


def changed_files(task: str, before: Mapping[str, str]) -> list[str]:
    """Return which of a task's files are not as they were.

    `before` may name more than source files that are loaded now: files that the task read, and
    those of other optimizers. These are read where they lie.
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
    """Return the directory of a user's task: of its outermost package, or of its module."""
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


_FILES = 256
"""The most files that are compared; a change of others may show in the data set's items."""
_BLOCK, _BLOCKS = 1 << 20, 64
"""Block size in bytes, and the most blocks of a file that are compared, evenly spread."""


class _Opened:
    """The paths that one thread has opened: for reading only, and for writing."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self.written: set[str] = set()


_thread = threading.local()


@contextmanager
def opened_files(task: str) -> Iterator[dict[str, str]]:
    """Record the files in a task's directory that this thread reads inside the context.

    Python's sources, hidden files and installed packages are left out. Files that are also written
    inside the context, such as a log or a new cache, are left out, too.
    """
    _install()
    opened, found = _Opened(), dict[str, str]()
    before = getattr(_thread, "opened", None)
    _thread.opened = opened
    try:
        yield found
    finally:
        _thread.opened = before
    directory = task_directory(task)
    if directory is None:
        return
    names = {name for path in opened.read - opened.written if (name := _below(directory, path))}
    for name in sorted(names)[:_FILES]:
        try:
            found[f"{OPENED} {name}"] = _digest(directory / name)
        except OSError:  # removed since, or not a regular file
            continue


@functools.cache
def _install() -> None:
    sys.addaudithook(_audit)  # an audit hook cannot be removed


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open":
        return
    opened = getattr(_thread, "opened", None)
    if opened is None:
        return
    path, _, flags = arguments
    if isinstance(path, str | bytes | os.PathLike):  # else a file descriptor
        writes = isinstance(flags, int) and flags & os.O_ACCMODE != os.O_RDONLY
        (opened.written if writes else opened.read).add(os.path.abspath(os.fsdecode(path)))


def _below(directory: Path, path: str) -> str | None:
    """Return a file's path relative to the directory; None if it is outside or left out."""
    for one in (Path(path), Path(os.path.realpath(path))):
        if one.is_relative_to(directory):
            name = one.relative_to(directory)
            kept = one.is_file() and one.suffix not in (".py", ".pyc")
            hidden = any(part.startswith(".") or part in FOREIGN for part in name.parts)
            return str(name) if kept and not hidden else None
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        count = -(-size // _BLOCK)
        for index in range(min(count, _BLOCKS)):
            if count > _BLOCKS:
                file.seek((size - _BLOCK) * index // (_BLOCKS - 1))
            digest.update(file.read(_BLOCK))
    return digest.hexdigest()
