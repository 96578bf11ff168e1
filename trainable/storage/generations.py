"""The interface of a checkpoint storage, and what all storages share: names, messages and errors.

`Files` is what the checkpoint store asks of a storage. `local.LocalFiles` is a directory on a
local or network file system, `objects.ObjectFiles` a prefix in an object store. Both give the same
promise: wherever a process is stopped, a generation has a manifest only when it is whole, and a
process that another one has replaced changes nothing that is there. What must not live here: a
particular storage, what a manifest says (`manifest.py`), or when to save (`checkpoint.py`).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from redaction.secrets import redact
from trainable.errors import StorageError, WriterReplaced
from trainable.storage.regular_files import IrregularFile

STATE = "state.pt"
MANIFEST = "manifest.json"

# A second generation of the same step is `step-00000120.1`: it exists when a run returned to a
# step from elsewhere, or when fp16 skipped every window between a checkpoint and the end of its
# epoch. In an object store the name has the writer's token too: `step-00000120-0f3a91c2d4e5`.
_NAME = re.compile(r"step-\d{8,}(?:-[0-9a-f]{12})?(?:\.\d+)?")
_QUARANTINE = "quarantine"
MISSING = (FileNotFoundError, NotADirectoryError)
"""What a storage raises for a file that is not there."""

_LIMITS = {
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`, RLIMIT_FSIZE), or see where "
    "the task sets it",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`, RLIMIT_NOFILE), or close what the "
    "task leaves open",
    errno.ENOMEM: "raise the limit on memory (`ulimit -v`, RLIMIT_AS), or see what takes it",
}
"""What to do where a process has met a limit of its own: no room on a disk helps."""

Write = Callable[[BinaryIO], bytes]
"""Writes a state into an open file and returns the manifest that describes what it wrote."""


class Files(Protocol):
    """The generations of one run. A generation is a name and two files, `STATE` and `MANIFEST`.

    Reading is for any process. Writing needs `open` first, and every writing method raises
    `WriterReplaced` once another process has opened the same generations.
    """

    remedy: str
    """What to do when the storage refuses, in words."""

    def at(self, address: str) -> Files:
        """Return the generations at another address of the same storage."""
        ...

    def address(self, name: str) -> str:
        """Return where a generation lies: a path, or `s3://...`; of no name: where all lie."""
        ...

    def names(self) -> list[str]:
        """Return the names of what may be generations; only a manifest that verifies tells."""
        ...

    def unused(self, step: int) -> str:
        """Return a name for a new generation of a step."""
        ...

    def damaged(self) -> list[str]:
        """Return the names of what is in quarantine; `read` takes them too."""
        ...

    def read(self, name: str, file: str) -> bytes:
        """Return a file's content; FileNotFoundError or NotADirectoryError when it is not there.

        Raises:
            StorageError: The storage cannot be read; what lies there is not damaged.
        """
        ...

    def length(self, name: str, file: str) -> int:
        """Return a file's length in bytes; fails as `read` does."""
        ...

    def open(self) -> None:
        """Become the one writer: shut out whoever was it, and remove what it left unfinished."""
        ...

    def commit(self, name: str, write: Write) -> None:
        """Add a generation: it is durable when this returns, and not to be seen before."""
        ...

    def remove(self, name: str) -> None:
        """Remove a generation: the manifest is the first of it that goes."""
        ...

    def quarantine(self, name: str) -> None:
        """Move a damaged generation to where it can be looked at and is never taken for one."""
        ...

    def close(self) -> None:
        """Stop being the writer, and leave nothing behind."""
        ...


class RunFiles(Files, Protocol):
    """The generations of one run, with what keeps the files beside them to the same writer."""

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, at once and durably."""
        ...

    def translate_fenced(self) -> AbstractContextManager[None]:
        """What the system says of a file that is gone becomes `WriterReplaced`, if that is why."""
        ...

    def has_writer(self) -> bool:
        """Whether a writer's room is there: of one that lives, or of one that was killed."""
        ...


@contextlib.contextmanager
def reading(files: Files, what: str = "") -> Iterator[None]:
    """Only what the storage itself says is not there, or is no file, counts as missing or damaged;
    all else is a `StorageError`.

    Args:
        what: Which part of the store is read.
    """
    try:
        yield
    except (*MISSING, IrregularFile):
        raise
    except OSError as problem:
        raise StorageError(
            f"the checkpoints at {files.address(what)} cannot be read: {redact(str(problem))}; "
            f"what was saved there is untouched; {remedy(problem, files.remedy)}, then resume"
        ) from problem


def remedy(problem: OSError, otherwise: str) -> str:
    """Return what to do about what the system said.

    Args:
        otherwise: Where it is about the storage and not about a limit of this process.
    """
    return _LIMITS.get(problem.errno or 0, otherwise)


def is_generation(name: str) -> bool:
    """Whether a name may be a generation's."""
    return _NAME.fullmatch(name) is not None


def quarantined(name: str = "") -> str:
    """Return a generation's name in quarantine; without one, the quarantine's own."""
    return f"{_QUARANTINE}/{name}".rstrip("/")


def unused_name(name: str, names: Collection[str]) -> str:
    """Return `name`, or with the first revision behind it that is not taken."""
    revisions = (f"{name}.{revision}" for revision in itertools.count(1))
    return next(one for one in itertools.chain([name], revisions) if one not in names)


def fenced(place: Path | str) -> WriterReplaced:
    """Return the error of a writer that has been replaced."""
    return WriterReplaced(
        f"another process has taken over {place}, or it was removed; this process has been "
        "replaced and changes nothing there any more; look at the one that goes on"
    )
