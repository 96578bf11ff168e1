"""What a checkpoint's `state.pt` holds: copied from the running training, as bytes, and back.

What must not live here: files, threads, or when anything is saved (see `checkpoint.py`).
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from trainable.errors import CheckpointError

_Memo = dict[tuple[Any, ...], Tensor]


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    """Copy a state to the host's memory, so that training may go on changing the original.

    Device synchronisation: each tensor on a device is waited for. Tensors that are one in the
    state (tied weights) are copied once and stay one.

    Args:
        state: Tensors, plain data, and dicts, lists and tuples of them.
    """
    copied: dict[str, Any] = _copy(state, {})
    return copied


def format_state(state: dict[str, Any]) -> bytes:
    """Return the bytes of `state.pt`."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


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


def _copy(value: Any, memo: _Memo) -> Any:
    if isinstance(value, Tensor):
        return _copy_tensor(value, memo)
    if isinstance(value, dict):
        copied = copy.copy(value)  # keeps the versions that a module's state dict carries
        for key, entry in value.items():
            copied[key] = _copy(entry, memo)
        return copied
    if type(value) in (list, tuple):
        return type(value)(_copy(entry, memo) for entry in value)
    return copy.deepcopy(value)


def _copy_tensor(tensor: Tensor, memo: _Memo) -> Tensor:
    key: tuple[Any, ...] = (id(tensor),)
    if tensor.layout is torch.strided:
        # State dicts make a new tensor object of a parameter each time: its memory tells.
        view = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        key = (*view, tensor.is_conj(), tensor.is_neg())
    if key not in memo:
        # device synchronisation: the copy is whole before training goes on
        memo[key] = tensor.detach().to("cpu", copy=True)
    copied = memo[key]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, requires_grad=tensor.requires_grad)
    return copied
