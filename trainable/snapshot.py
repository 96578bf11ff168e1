"""What a checkpoint's `state.pt` holds: copied from the running training, written, and read back.

What must not live here: files, threads, or when anything is saved (see `checkpoint.py`).
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Collection
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from trainable.errors import CheckpointError

_PIECE = 2**20
_Memo = dict[tuple[Any, ...], Tensor]
_Spare = dict[tuple[Any, ...], list[Tensor]]
_Pairs = list[tuple[Tensor, Tensor]]


class Snapshots:
    """Copies states to the host's memory, so that training may go on changing the original.

    The memory of one copy is kept for the next one: a page that is touched for the first time
    costs eight times its copy. So there is one copy at any time; taking another one overwrites it.
    """

    def __init__(self) -> None:
        self._spare: _Spare = {}
        self._unfinished: _Pairs = []

    def take(self, state: dict[str, Any], steady: Collection[str] = ()) -> dict[str, Any]:
        """Copy a state over the one before it.

        Device synchronisation: each tensor on a device is waited for. Tensors that are one in the
        state (tied weights) are copied once and stay one.

        Args:
            state: Tensors, plain data, and dicts, lists and tuples of them.
            steady: Its entries whose tensors do not change before `finish` has copied them.
        """
        spare, self._spare = self._spare, {}
        memo: _Memo = {}
        self._unfinished = []
        copied = copy.copy(state)
        for key in sorted(state, key=lambda key: key in steady):  # shared: copied at once
            pairs = self._unfinished if key in steady else None
            copied[key] = _copy(state[key], memo, spare, pairs)
        for tensor in memo.values():
            if _is_plain(tensor):
                self._spare.setdefault(_layout(tensor), []).append(tensor)
        return copied

    def finish(self) -> None:
        """Copy the tensors of the steady entries, in any thread."""
        pairs, self._unfinished = self._unfinished, []
        for target, original in pairs:
            target.copy_(original)  # device synchronisation, in the thread that writes


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state in the host's memory, for good."""
    return Snapshots().take(state)


def num_bytes(state: Any) -> int:
    """Return the memory of all tensors in a state, in bytes."""
    if isinstance(state, Tensor):
        return state.nbytes
    if isinstance(state, dict):
        return sum(map(num_bytes, state.values()))
    return sum(map(num_bytes, state)) if isinstance(state, (list, tuple)) else 0


def write_state(state: dict[str, Any], file: BinaryIO) -> tuple[int, str]:
    """Write `state.pt`; returns its length and sha256.

    Args:
        state: What `Snapshots.take` returned.
        file: Where to.
    """
    digesting = _Digesting(file)
    # Its checksums would only repeat what the manifest's digest says, holding the interpreter's
    # lock meanwhile.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, digesting)  # type: ignore[arg-type]  # `write` and `flush` will do
    finally:
        torch.serialization.set_crc32_options(before)
    return digesting.length, digesting.sha256


class _Digesting:
    """A file that knows the length and digest of what has been written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.length = 0

    def write(self, part: bytes | memoryview) -> int:
        # A state comes in parts of a tensor each. Pieces that are still in the processor's cache
        # when they are written cost the training beside it less of the memory's bandwidth.
        view = memoryview(part).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._sha256.update(piece)  # lets other threads run meanwhile, as writing does
            self._file.write(piece)
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        self._file.flush()

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()


def parse_state(content: bytes) -> dict[str, Any]:
    """Return the state, with every tensor on the CPU.

    Raises:
        CheckpointError: It holds objects that are not plain data.
    """
    try:
        state: dict[str, Any] = torch.load(
            io.BytesIO(content), map_location="cpu", weights_only=True
        )
    except pickle.UnpicklingError as problem:
        raise CheckpointError(
            f"the checkpoint holds objects that are not plain data ({problem}); keep the state of "
            "models and "
            "optimizers to tensors, numbers, strings, lists and dicts"
        ) from problem
    return state


def _copy(value: Any, memo: _Memo, spare: _Spare, later: _Pairs | None) -> Any:
    if isinstance(value, Tensor):
        return _copy_tensor(value, memo, spare, later)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the versions that a module's state dict carries
        for key, entry in value.items():
            copied[key] = _copy(entry, memo, spare, later)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copy(entry, memo, spare, later) for entry in value)
    return copy.deepcopy(value)


def _copy_tensor(tensor: Tensor, memo: _Memo, spare: _Spare, later: _Pairs | None) -> Tensor:
    key: tuple[Any, ...] = (id(tensor),)
    if tensor.layout is torch.strided:
        # State dicts make a new tensor object of a parameter each time: its memory tells.
        view = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        key = (*view, tensor.is_conj(), tensor.is_neg())
    if key not in memo:
        original = tensor.detach()
        free = spare.get(_layout(original)) if _is_plain(original) else None
        if later is not None and _is_plain(original):
            memo[key] = free.pop() if free else torch.empty_like(original, device="cpu")
            later.append((memo[key], original))
        else:  # device synchronisation: the copy is whole before training goes on
            memo[key] = free.pop().copy_(original) if free else original.to("cpu", copy=True)
    copied = memo[key]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied


def _is_plain(tensor: Tensor) -> bool:
    """Whether another tensor of the same layout can take its place."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride())
