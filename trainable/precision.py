"""Mixed precision: autocast and, for fp16 only, the gradient scaler.

What must not live here: the order in which a step uses it (see `step.py`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainable.errors import ConfigError

Name = Literal["fp32", "bf16", "fp16"]

# Torch's default of 2**16 suits mean losses; tasks return sums, which are larger by about the
# batch size. A first scale that is too high costs skipped steps; one that is too low grows within
# the first few thousand steps.
_INITIAL_SCALE = 2.0**10


def resolve_precision(name: str, device: torch.device) -> Name:
    """Return the precision to train in."""
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        if device.type != "cuda":
            return "fp32"
        return "bf16" if has_bf16 else "fp16"
    if name == "bf16" and not has_bf16:
        raise ConfigError(
            f"bf16; {device_name(device)} does not compute in it; write auto, fp16 or fp32",
            key="train.precision",
        )
    if device.type not in ("cpu", "cuda") and name != "fp32":
        raise ConfigError(
            f"{name}; on the device {device} only fp32 is supported; write auto or fp32",
            key="train.precision",
        )
    assert name in ("fp32", "bf16", "fp16")
    return name  # type: ignore[return-value]


def device_name(device: torch.device) -> str:
    """Return the device with its model name, such as `cuda:0 (NVIDIA T4)`, or `cpu`."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


class Precision:
    """Autocast and gradient scaling for one run."""

    def __init__(
        self, name: Name, device: torch.device, *, initial_scale: float = _INITIAL_SCALE
    ) -> None:
        self.name = name
        self.device = device
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type, init_scale=initial_scale)
            # torch makes the scale for the first loss, and a rank may have no sample in its window
            self.scaler.scale(torch.zeros((), device=device))

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        if self.name == "fp32":
            return nullcontext()
        dtype = torch.bfloat16 if self.name == "bf16" else torch.float16
        return torch.autocast(self.device.type, dtype=dtype)

    def clear_cast_cache_each_forward(self, model: nn.Module) -> None:
        """Clear autocast's cache of cast weights before each forward pass of the model.

        Autocast caches casts while it is enabled. A task may write other weights into the model
        meanwhile, such as a moving average.
        """
        if self.name != "fp32":
            model.register_forward_pre_hook(lambda *_: torch.clear_autocast_cache())

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss, for the backward pass."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, before they are measured and clipped."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, unless fp16 gradients overflowed."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)

    def update(self) -> bool:
        """Update the scale; return whether the optimizer's step was taken."""
        if self.scaler is None:
            return True
        before = self.scaler.get_scale()
        self.scaler.update()
        # Device synchronisation, fp16 only: the schedule and the step count must know whether the
        # step was taken.
        return self.scaler.get_scale() >= before

    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state; empty without one."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scaler's state; do nothing if either precision has no scaler."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def find_device(name: str | None) -> torch.device:
    """Return the device of that name; None: the first CUDA device, or else the CPU."""
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f"device is {name!r}; it must be such as 'cpu' or 'cuda:0'") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {name!r}, and this machine has no usable CUDA device; write 'cpu'"
        )
    return device
