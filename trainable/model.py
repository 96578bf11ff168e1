"""Apply compilation, memory layout and activation checkpointing to a model.

Nothing here changes a parameter, a name in the state dict, or a result beyond rounding. So a run
may resume with other settings. What must not live here: how models are built or trained.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from trainable.config import TrainConfig
from trainable.errors import ConfigError
from trainable.object_kinds import has_overlap
from trainable.store.private_files import set_cache_directories


def prepare_model(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Apply the settings to the model in place, and return it."""
    if config.channels_last:
        _lay_out_channels_last(model)
    if config.activation_checkpointing:
        for block in _known_blocks(model):
            block.forward = partial(_checkpointed_forward, block, block.forward)
    if config.compile:
        # Compile the forward method, not the module: compiled code would keep the hooks that the
        # module has now, and evaluation adds one. Compile for each batch size: dynamic code is
        # made at the second size and rounds differently, and a resumed run meets that size at
        # another step. Reset: code compiled for earlier runs would count towards torch's limit.
        set_cache_directories()
        torch.compiler.reset()
        model.forward = torch.compile(model.forward, dynamic=False)
    return model


def make_buffers_writable(model: nn.Module) -> None:
    """Give each element of expanded buffers, which share memory, memory of its own."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer) and has_overlap(buffer):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def _lay_out_channels_last(model: nn.Module) -> None:
    if not any(parameter.ndim == 4 for parameter in model.parameters()):
        raise ConfigError(
            "true, and the model has no two-dimensional convolution; remove it",
            key="train.channels_last",
        )
    model.to(memory_format=torch.channels_last)
    model.register_forward_pre_hook(lambda _, inputs: tuple(map(_channels_last, inputs)))


def _channels_last(value: Any) -> Any:
    if isinstance(value, Tensor) and value.ndim == 4:
        return value.contiguous(memory_format=torch.channels_last)
    return value


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the model's blocks: the members of its module lists, or those of a Sequential."""
    members = [
        member
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for member in module
        if not isinstance(member, nn.ModuleList)  # a list of lists: only inner members are blocks
    ]
    # Only the outermost blocks: one inside another would be computed three times.
    inner = {id(part) for member in members for part in member.modules() if part is not member}
    blocks = [member for member in members if id(member) not in inner]
    if not blocks and isinstance(model, nn.Sequential):
        blocks = [part for part in model if any(True for _ in part.parameters())]
    return blocks


def _known_blocks(model: nn.Module) -> list[nn.Module]:
    blocks = blocks_of(model)
    if not blocks:
        raise ConfigError(
            "true, and the model neither has a ModuleList nor is it a Sequential, so its blocks "
            "are unknown; remove it, or put the blocks into an nn.ModuleList",
            key="train.activation_checkpointing",
        )
    return blocks


def _checkpointed_forward(
    block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    """Call a block's forward method, which the backward pass calls again.

    The second call uses copies of the buffers from before the first one. A spectral norm is
    therefore the same in both, and running statistics see each batch once.
    """
    again = partial(checkpoint, forward, use_reentrant=False)
    # A compiled graph writes to buffers once, and without gradients nothing is recomputed.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        buffers = _SavedBuffers(block)
        again = partial(again, context_fn=lambda: (nullcontext(), buffers))
    return again(*inputs, **options)


class _SavedBuffers:
    """A reusable context in which a block has copies of its present buffers."""

    def __init__(self, block: nn.Module) -> None:
        self._saved = [
            (module, name, buffer.detach().clone())
            for module in block.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if not is_lazy(buffer)  # this call creates it
        ]

    def __enter__(self) -> None:
        self._own = [(module, name, getattr(module, name)) for module, name, _ in self._saved]
        for module, name, buffer in self._saved:
            setattr(module, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._own:
            setattr(module, name, buffer)
        self._own.clear()
