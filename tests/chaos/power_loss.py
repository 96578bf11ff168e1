"""The possible contents of a directory after a power loss, by what file systems guarantee.

A file system promises: what was in a file when it was synced, and the entries that a directory had
when it was synced. Everything since may be there, be missing, or be there in part. `Disk` replays
recorded operations and writes the directory as it may be found afterwards.
What must not live here: how operations are recorded (`faults.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from tests.chaos.faults import Kind, Operation

Fate = Literal["kept", "dropped", "torn", "unnamed"]
"""What becomes of everything that was not synced: all of it is there (as after SIGKILL); nothing
is; the names are there, but only the first half of what changed in each file; the contents are
there but not the names.
"""
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass
class _File:
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def after(self, fate: Fate) -> bytes:
        if fate == "dropped":
            return self.synced
        if fate == "torn":
            return _torn(bytes(self.content), self.synced)
        return bytes(self.content)


@dataclass
class _Directory:
    entries: dict[str, _File | _Directory] = field(default_factory=dict)
    synced: dict[str, _File | _Directory] = field(default_factory=dict)


class Disk:
    """A directory, with what of it is on the disk for certain.

    Args:
        base: The directory before the first operation, all of it synced; empty when not given.
    """

    def __init__(self, base: Path | None = None) -> None:
        self._root = _Directory() if base is None else _read(base)

    def apply(self, operations: Iterable[Operation]) -> None:
        """Replay operations; those that failed did nothing."""
        for operation in operations:
            if not operation.error:
                self._apply(operation)

    def write(self, target: Path, fate: Fate) -> None:
        """Write the directory as it is found after a power loss now."""
        _write(self._root, target, fate)

    def _apply(self, operation: Operation) -> None:
        if operation.kind is Kind.SYNC:
            node = self._find(operation.path)
            if isinstance(node, _File):
                node.synced = bytes(node.content)
            else:
                node.synced = dict(node.entries)
            return
        if operation.kind in (Kind.WRITE, Kind.TRUNCATE):
            self._change(operation)
            return
        if not operation.path:  # the watched directory itself was made
            return
        parent, name = self._parent(operation.path)
        if operation.kind is Kind.CREATE:
            parent.entries[name] = _File()
        elif operation.kind is Kind.MKDIR:
            parent.entries[name] = _Directory()
        elif operation.kind in (Kind.UNLINK, Kind.RMDIR):
            # safetensors names its file by a system call of its own, which no library sees
            parent.entries.pop(name, None)
        else:
            assert operation.kind is Kind.RENAME
            assert operation.other, f"{operation} leaves the watched directory"
            target, new = self._parent(operation.other)
            target.entries[new] = parent.entries.pop(name)

    def _change(self, operation: Operation) -> None:
        file = self._find(operation.path)
        assert isinstance(file, _File)
        if operation.kind is Kind.TRUNCATE:
            del file.content[operation.length :]
            file.content.extend(bytes(operation.length - len(file.content)))
            return
        assert len(operation.data) == operation.length, "the record lacks what was written"
        file.content.extend(bytes(max(0, operation.offset - len(file.content))))
        file.content[operation.offset : operation.offset + operation.length] = operation.data

    def _find(self, path: str) -> _File | _Directory:
        node: _File | _Directory = self._root
        for name in filter(None, path.split("/")):
            assert isinstance(node, _Directory)
            node = node.entries[name]
        return node

    def _parent(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = path.rpartition("/")
        node = self._find(parent)
        assert isinstance(node, _Directory)
        return node, name


def _torn(content: bytes, synced: bytes) -> bytes:
    """A file whose length has arrived, but only the first half of its changed bytes."""
    behind = synced[: len(content)].ljust(len(content), b"\0")
    changed = [at for at, (new, old) in enumerate(zip(content, behind, strict=True)) if new != old]
    until = changed[len(changed) // 2] if changed else 0
    return content[:until] + behind[until:]


def _read(path: Path) -> _Directory:
    found = _Directory()
    for entry in path.iterdir():
        if entry.is_dir():
            found.entries[entry.name] = _read(entry)
        else:
            content = entry.read_bytes()
            found.entries[entry.name] = _File(bytearray(content), content)
    found.synced = dict(found.entries)
    return found


def _write(directory: _Directory, target: Path, fate: Fate) -> None:
    target.mkdir(parents=True, exist_ok=True)
    by_name = directory.synced if fate in ("dropped", "unnamed") else directory.entries
    for name, node in by_name.items():
        if isinstance(node, _Directory):
            _write(node, target / name, fate)
        else:
            (target / name).write_bytes(node.after(fate))
