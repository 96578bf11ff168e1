"""Copy a training state to host memory, write it as `state.pt`, and read it back.

What must not live here: files, threads, or when a checkpoint is saved (`checkpoint.py`).
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import zipfile
from collections.abc import Collection
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trainable.errors import CheckpointError
from trainable.store.sharded_state import SHARDS

_PIECE = 2**20
_END, _LOCATOR, _LARGE_END = 22, 20, 56
"""Bytes of the last records of a ZIP archive, from its end: end, zip64 locator, zip64 end."""
_Spare = dict[tuple[Any, ...], list[Tensor]]
_Pairs = list[tuple[Tensor, Tensor]]


class Snapshots:
    """Copy states to host memory, so that training can change the originals.

    The next copy overwrites the last one and uses its memory: touching a page for the first time
    costs eight times as much as copying it.
    """

    def __init__(self) -> None:
        self._spare: _Spare = {}
        self._unfinished: _Pairs = []

    def take(self, state: dict[str, Any], async_copy_keys: Collection[str] = ()) -> dict[str, Any]:
        """Copy a state; this overwrites the previous copy.

        Device synchronisation: this waits for each tensor on a device. A tensor that the state has
        twice (tied weights) is copied once, and both places share the copy.
        """
        copying = _Copying(self._spare)

        def copies(entries: dict[str, Any]) -> dict[str, Any]:
            return {
                key: copies(entry)  # this rank's parts, by entry
                if key == SHARDS
                else copying.copy(entry, later=key in async_copy_keys)
                for key, entry in entries.items()
            }

        copied = copies(state)
        self._spare, self._unfinished = copying.memory(), copying.later
        return copied

    def finish(self) -> None:
        """Copy the tensors of the entries in `async_copy_keys`. Any thread may call this."""
        pairs, self._unfinished = self._unfinished, []
        for target, original in pairs:
            target.copy_(original)  # device synchronisation, in the writing thread


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state in host memory, which later copies do not overwrite."""
    return Snapshots().take(state)


def num_bytes(state: Any) -> int:
    """Return the memory of all tensors in a state, in bytes."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(num_bytes, state.values()))
    return sum(map(num_bytes, state)) if isinstance(state, (list, tuple)) else 0


def write_state(state: dict[str, Any], file: BinaryIO) -> tuple[int, str]:
    """Write `state.pt` and return its length and sha256."""
    digesting = _Digesting(file)
    # The manifest has a sha256; torch's CRC-32 would add nothing and hold the GIL while it runs.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, digesting)  # type: ignore[arg-type]  # needs only `write` and `flush`
    except RuntimeError as problem:
        # The zip writer replaces the file's OSError by a RuntimeError: raise the OSError.
        if isinstance(problem.__context__, OSError):
            raise problem.__context__ from None
        raise
    finally:
        torch.serialization.set_crc32_options(before)
    return digesting.length, digesting.sha256


class _Digesting:
    """Count the length and compute the sha256 of what is written to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.length = 0

    def write(self, part: bytes | memoryview) -> int:
        # Each part is a whole tensor. A small piece is still in the CPU cache when it is written,
        # which leaves more memory bandwidth to the training.
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._sha256.update(piece)  # releases the GIL, as writing does
            self._file.write(piece)
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


def parse_state(content: bytes, name: str = "the checkpoint") -> dict[str, Any]:
    """Return the state that the bytes of a `state.pt` hold, with every tensor on the CPU."""
    _check_size(content, name)
    try:
        state: dict[str, Any] = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
    except pickle.UnpicklingError as problem:
        raise CheckpointError(
            f"{name} holds objects that are not plain data ({problem}); keep the state of models "
            "and optimizers to tensors, numbers, strings, lists and dicts"
        ) from problem
    except MemoryError:
        raise
    except Exception as problem:  # torch raises anything for bytes that it has not written
        raise CheckpointError(
            f"{name} is no state of a run ({type(problem).__name__}: {problem}); use one that a "
            "run saved"
        ) from problem
    return state


def _check_size(content: bytes, name: str) -> None:
    """Reject an archive that decompresses to more than its own size and could fill the memory.

    torch itself writes no compressed entries and stores nothing twice.
    """
    if not content.startswith(b"PK\3\4"):  # torch's own test for an archive
        return  # torch.load raises for it
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries, start = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as problem:
        raise CheckpointError(
            f"{name} is not an archive written by torch ({problem}); use one that a run saved"
        ) from problem
    if start != _directory_start(content):
        raise CheckpointError(
            f"{name} is not an archive written by torch (its directory is not where its end "
            "record says); use one that a run saved"
        )
    size = sum(entry.file_size for entry in entries)
    if size > len(content) or any(entry.compress_type for entry in entries):
        raise CheckpointError(
            f"{name} has {len(content)} bytes and would take {size} in memory; torch writes no "
            "compressed checkpoints; use one that a run saved"
        )


def _directory_start(content: bytes) -> int | None:
    """Return where torch reads the archive's central directory.

    None if torch did not write the end records, which have no comment and valid zip64 records
    (APPNOTE 4.3.14 to 4.3.16). Python reads the directory right before the end records, where a
    crafted file may have another one.
    """
    end = content[-_END:]
    if end[:4] != b"PK\5\6" or end[-2:] != b"\0\0":
        return None
    if content[-_END - _LOCATOR :][:4] != b"PK\6\7":
        return int.from_bytes(end[16:20], "little")
    record = len(content) - _END - _LOCATOR - _LARGE_END
    is_there = content[record:][:4] == b"PK\6\6" if record >= 0 else False
    if not is_there or int.from_bytes(content[-_END - 12 : -_END - 4], "little") != record:
        return None
    return int.from_bytes(content[record + 48 : record + 56], "little")


class _Copying:
    """Copy one state."""

    def __init__(self, spare: _Spare) -> None:
        self._spare = spare
        self._memo: dict[tuple[Any, ...], Tensor] = {}
        self.later: _Pairs = []
        """Target and source of each tensor that `finish` copies."""

    def copy(self, value: Any, *, later: bool) -> Any:
        """Copy a part of an entry, or prepare its copy."""
        if isinstance(value, Tensor):
            return self._copy_tensor(value, later)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps the versions that a module's state dict carries
            for key, part in value.items():
                copied[key] = self.copy(part, later=later)
            return copied
        if type(value) in (list, tuple):
            return type(value)(self.copy(part, later=later) for part in value)
        return copy.deepcopy(value)

    def memory(self) -> _Spare:
        """Return the memory of this copy, by layout."""
        taken: _Spare = {}
        for tensor in filter(_is_plain, self._memo.values()):
            taken.setdefault(_layout(tensor), []).append(tensor)
        return taken

    def _copy_tensor(self, tensor: Tensor, later: bool) -> Tensor:
        key: tuple[Any, ...] = (id(tensor),)
        if tensor.layout is torch.strided:
            # state_dict() makes a new tensor object each time: identify a tensor by its memory.
            view = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
            key = (*view, tensor.is_conj(), tensor.is_neg())
        if key not in self._memo:
            self._memo[key] = self._copy_new(tensor.detach(), later)
        copied = self._memo[key]
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copied, requires_grad=tensor.requires_grad)
        return copied

    def _copy_new(self, original: Tensor, later: bool) -> Tensor:
        if not _is_plain(original):
            return original.to("cpu", copy=True)  # device synchronisation
        free = self._spare.get(_layout(original))
        target = free.pop() if free else torch.empty_like(original, device="cpu")
        if later:
            self.later.append((target, original))
        else:
            target.copy_(original)  # device synchronisation: complete before training resumes
        return target


def _is_plain(tensor: Tensor) -> bool:
    """Whether another tensor of the same layout can take its place."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride())
