"""Files: the protocol of a checkpoint storage; the names, messages and errors of all storages.

Every storage guarantees, whenever a process is killed: a generation has a manifest only if it is
complete, and a replaced writer changes nothing. What must not live here: a particular storage
(`local.py`, `objects.py`), what a manifest says (`manifest.py`), or when to save
(`checkpoint.py`).
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
from trainable.errors import StorageError
from trainable.store.regular_files import IrregularFile

STATE = "state.pt"
MANIFEST = "manifest.json"

# A second generation of the same step is `step-00000120.1`. A run writes one when it resumes from
# an older generation, or when fp16 skipped each window between a checkpoint and the epoch's end.
# In an object store the name has the writer's token too: `step-00000120-0f3a91c2d4e5`.
_NAME = re.compile(r"step-\d{8,}(?:-[0-9a-f]{12})?(?:\.\d+)?")
_SHARD = re.compile(r"shard-\d{5,}\.pt")
_QUARANTINE = "quarantine"
MISSING = (FileNotFoundError, NotADirectoryError)
"""The exceptions of a storage for a missing file."""

_LIMITS = {
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`, RLIMIT_FSIZE), or find "
    "where the task sets it",
    errno.EMFILE: "raise the limit on open files (`ulimit -n`, RLIMIT_NOFILE), or close the files "
    "that the task leaves open",
    errno.ENOMEM: "raise the limit on memory (`ulimit -v`, RLIMIT_AS), or find what uses it",
}
"""Remedies for errors that come from a limit of the process, not from the storage."""

Write = Callable[[BinaryIO], bytes]
"""Writes a state into an open file and returns the manifest that describes what it wrote."""
WriteShard = Callable[[BinaryIO], None]
"""Writes a shard into an open file."""


class Files(Protocol):
    """The generations of one run. A generation is a name and its files: `STATE` and `MANIFEST`.

    A sharded state has one more file for each rank, named by `shard_name`. Any process may read.
    A writer calls `open` first; its writing methods raise `WriterReplaced` once another process
    has opened the same generations.
    """

    remedy: str
    """What the user should do when the storage fails; a part of messages."""

    def at(self, address: str) -> Files:
        """Return the generations at another address of the same storage."""
        ...

    def address(self, name: str) -> str:
        """Return a generation's path or `s3://...` address; for "", the one of their parent."""
        ...

    def names(self) -> list[str]:
        """Return the names that generations have; their manifests may still be invalid."""
        ...

    def unused(self, step: int) -> str:
        """Return a name for a new generation of a step."""
        ...

    def damaged(self) -> list[str]:
        """Return the names of the quarantined generations; `read` accepts them too."""
        ...

    def read(self, name: str, file: str) -> bytes:
        """Return a file's content.

        Raises:
            OSError: FileNotFoundError or NotADirectoryError: the file does not exist.
            StorageError: The storage cannot be read. The file may be sound.
        """
        ...

    def length(self, name: str, file: str) -> int:
        """Return a file's length in bytes; fails as `read` does."""
        ...

    def open(self) -> None:
        """Become the only writer: block the one before, and remove its unfinished generations."""
        ...

    def begin(self, name: str) -> str:
        """Return where the shards of a new generation are written; `commit` adds them with it."""
        ...

    def add_shard(self, begun: str, file: str, write: WriteShard) -> None:
        """Write a shard of a generation that the writer began, durably; any rank may call this."""
        ...

    def commit(self, name: str, write: Write) -> None:
        """Add a generation: invisible before this returns, durable afterwards."""
        ...

    def remove(self, name: str) -> None:
        """Remove a generation, its manifest first."""
        ...

    def quarantine(self, name: str) -> None:
        """Move a damaged generation to the quarantine, where `names` does not list it."""
        ...

    def close(self) -> None:
        """Stop being the writer, and remove the writer's temporary files."""
        ...


class RunFiles(Files, Protocol):
    """The generations of one run, and the other files of the run that have the same writer."""

    def replace(self, path: Path, content: bytes) -> None:
        """Replace another file of the run, atomically and durably."""
        ...

    def translate_fenced(self) -> AbstractContextManager[None]:
        """Raise `WriterReplaced` for a missing-file error that another writer has caused."""
        ...

    def has_writer(self) -> bool:
        """Whether a writer's directory exists: of a running writer, or of one that was killed."""
        ...


@contextlib.contextmanager
def reading(files: Files, what: str = "") -> Iterator[None]:
    """Raise `StorageError` for any error of the storage but a missing or irregular file."""
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
    """Return the remedy for an error: `otherwise`, unless a limit of this process caused it."""
    return _LIMITS.get(problem.errno or 0, otherwise)


def is_generation(name: str) -> bool:
    """Whether a name has the form of a generation's name."""
    return _NAME.fullmatch(name) is not None


def shard_name(rank: int) -> str:
    """Return the name of the file with a rank's part of a sharded state."""
    return f"shard-{rank:05d}.pt"


def has_tensors(file: str) -> bool:
    """Whether a file of a generation is as large as its tensors: a state or a shard."""
    return file == STATE or _SHARD.fullmatch(file) is not None


def quarantined(name: str = "") -> str:
    """Return a generation's name in the quarantine; for "", the quarantine's own name."""
    return f"{_QUARANTINE}/{name}".rstrip("/")


def unused_name(name: str, names: Collection[str]) -> str:
    """Return `name`, or `name.1`, `name.2` ...: the first that is not in `names`."""
    revisions = (f"{name}.{revision}" for revision in itertools.count(1))
    return next(one for one in itertools.chain([name], revisions) if one not in names)
