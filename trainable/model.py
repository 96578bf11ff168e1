"""How a model is run, not what it computes: compilation, memory layout, activations kept or not.

Nothing here changes a parameter, a name in the state dict, or a result beyond rounding; a run may
be resumed with other settings. What must not live here: how models are built or trained.
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


def prepare_model(model: nn.Module, config: TrainConfig) -> nn.Module:
    """Set the model up as the configuration asks, in place.

    Args:
        model: On its device.
        config: `compile`, `channels_last` and `activation_checkpointing` count.

    Raises:
        ConfigError: The model has nothing to which a setting would apply.
    """
    if config.channels_last:
        _lay_out_channels_last(model)
    if config.activation_checkpointing:
        for block in _blocks(model):
            block.forward = partial(_computed_again, block, block.forward)
    if config.compile:
        # The forward method, not the module: hooks come and go (evaluation has one), and compiled
        # code would keep calling those it was made with. For each size of a batch there is code of
        # its own: code for any size is made at the second one, rounds differently, and a run that
        # resumes meets that one elsewhere. What this process compiled for runs before would count.
        torch.compiler.reset()
        model.forward = torch.compile(model.forward, dynamic=False)
    return model


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


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated parts of a model: what lies in its module lists, or else in a Sequential."""
    members = [
        member
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for member in module
        if not isinstance(member, nn.ModuleList)  # holds blocks, and is none itself
    ]
    # A block inside a block would be computed three times.
    inner = {id(part) for member in members for part in member.modules() if part is not member}
    blocks = [member for member in members if id(member) not in inner]
    if not blocks and isinstance(model, nn.Sequential):
        blocks = [part for part in model if any(True for _ in part.parameters())]
    if not blocks:
        raise ConfigError(
            "true, and the model has neither a ModuleList nor is it a Sequential, so its blocks "
            "are not known; remove it, or hold the blocks in an nn.ModuleList",
            key="train.activation_checkpointing",
        )
    return blocks


def _computed_again(
    block: nn.Module, forward: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    """Call a block's forward method, which the backward pass calls a second time.

    The second call computes from the buffers that the first one found, and what it writes to them
    is dropped: a spectral norm is the same in both, and running statistics see each batch once.
    """
    again = partial(checkpoint, forward, use_reentrant=False)
    # A compiled graph writes to buffers once, and nothing is computed again without a gradient.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _FoundBuffers(block)
        again = partial(again, context_fn=lambda: (nullcontext(), found))
    return again(*inputs, **options)


class _FoundBuffers:
    """A context, any number of times, in which a block has copies of the buffers it has now."""

    def __init__(self, block: nn.Module) -> None:
        self._found = [
            (module, name, buffer.detach().clone())
            for module in block.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
            if not is_lazy(buffer)  # made by this call
        ]

    def __enter__(self) -> None:
        self._own = [(module, name, getattr(module, name)) for module, name, _ in self._found]
        for module, name, buffer in self._found:
            setattr(module, name, buffer.clone())

    def __exit__(self, *_: object) -> None:
        for module, name, buffer in self._own:
            setattr(module, name, buffer)
        self._own.clear()
