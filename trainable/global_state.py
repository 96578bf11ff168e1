"""What a task can change of torch for its whole process, and putting it back for the next one.

A warm process runs one trial after the other; a default type, a mode or a hook that one of them
left behind would change what the next one computes. What must not live here: what a run itself
sets each time it is opened (seeds, determinism, threads: `build.py`, `seeding.py`), and what is
not torch's (`process_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
import torch.multiprocessing
from torch.nn.modules import module
from torch.optim import optimizer

_DEVICES = ("cpu", "cuda")


class GlobalTorchState:
    """torch's process-wide state, and how numpy answers errors, as they are now."""

    def __init__(self) -> None:
        self._put_back: list[Callable[[], object]] = []
        for get, set_ in _SWITCHES:
            self._keep(get(), get, set_)
        for device in _DEVICES:
            self._keep_autocast(device)
        # torch has public ways of adding a hook for all modules and none of listing them.
        for owner in (module, optimizer):
            for name, hooks in vars(owner).items():
                if name.startswith("_global_") and isinstance(hooks, dict):
                    self._put_back.append(_hooks_as_they_are(hooks))

    def restore(self) -> None:
        """Put everything back."""
        for put_back in self._put_back:
            put_back()

    def _keep(self, value: Any, get: Callable[[], Any], set_: Callable[[Any], object]) -> None:
        def put_back() -> None:
            try:
                changed = get() != value
            except RuntimeError:  # torch tells no precision that was set in two ways
                changed = True
            if changed:
                set_(value)

        self._put_back.append(put_back)

    def _keep_autocast(self, device: str) -> None:
        self._keep(
            torch.is_autocast_enabled(device),
            lambda: torch.is_autocast_enabled(device),
            lambda on: torch.set_autocast_enabled(device, on),
        )
        self._keep(
            torch.get_autocast_dtype(device),
            lambda: torch.get_autocast_dtype(device),
            lambda dtype: torch.set_autocast_dtype(device, dtype),
        )


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_BACKENDS: Any = torch.backends  # whose parts are told to no type checker
_SWITCHES: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (numpy.geterr, lambda errors: numpy.seterr(**errors)),
    (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    # Which kernels compute. Of precisions the older switches come first, which write the newer
    # ones, and of these the general one, which others follow.
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _attribute(_BACKENDS.cudnn, "allow_tf32"),
    *(
        _attribute(owner, "fp32_precision")
        for owner in (
            _BACKENDS,
            _BACKENDS.cuda.matmul,
            _BACKENDS.cudnn,
            _BACKENDS.cudnn.conv,
            _BACKENDS.cudnn.rnn,
            _BACKENDS.mkldnn,
            _BACKENDS.mkldnn.conv,
            _BACKENDS.mkldnn.matmul,
            _BACKENDS.mkldnn.rnn,
        )
    ),
    _attribute(_BACKENDS.cuda.matmul, "allow_fp16_accumulation"),
    _attribute(_BACKENDS.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    _attribute(_BACKENDS.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    _attribute(_BACKENDS.cudnn, "enabled"),
    _attribute(_BACKENDS.mkldnn, "enabled"),
    (_BACKENDS.cuda.flash_sdp_enabled, _BACKENDS.cuda.enable_flash_sdp),
    (_BACKENDS.cuda.mem_efficient_sdp_enabled, _BACKENDS.cuda.enable_mem_efficient_sdp),
    (_BACKENDS.cuda.math_sdp_enabled, _BACKENDS.cuda.enable_math_sdp),
    (_BACKENDS.cuda.cudnn_sdp_enabled, _BACKENDS.cuda.enable_cudnn_sdp),
]


def _hooks_as_they_are(hooks: dict[Any, Any]) -> Callable[[], None]:
    before = dict(hooks)

    def put_back() -> None:
        hooks.clear()
        hooks.update(before)

    return put_back
