"""GlobalTorchState: torch's process-wide state, restored for the next trial.

A worker process runs one trial after the other. A default dtype, a mode or a hook of one trial
would change what the next one computes. What must not live here: what each run sets when it is
opened (seeds, determinism, threads: `build.py`, `seeding.py`), and state other than torch's
(`process_state.py`).
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
    """torch's process-wide state and numpy's error handling when this object is made."""

    def __init__(self) -> None:
        self._restore: list[Callable[[], object]] = []
        for get, set_ in _SETTINGS:
            self._capture(get(), get, set_)
        for device in _DEVICES:
            self._capture_autocast(device)
        # torch has public functions that add a hook for all modules, but none that lists them.
        for owner in (module, optimizer):
            for name, hooks in vars(owner).items():
                if name.startswith("_global_") and isinstance(hooks, dict):
                    self._restore.append(_capture_hooks(hooks))

    def restore(self) -> None:
        """Restore everything."""
        for restore in self._restore:
            restore()

    def _capture(self, value: Any, get: Callable[[], Any], set_: Callable[[Any], object]) -> None:
        def restore() -> None:
            try:
                changed = get() != value
            except RuntimeError:  # torch raises if a precision was set by both the old and new API
                changed = True
            if changed:
                set_(value)

        self._restore.append(restore)

    def _capture_autocast(self, device: str) -> None:
        self._capture(
            torch.is_autocast_enabled(device),
            lambda: torch.is_autocast_enabled(device),
            lambda on: torch.set_autocast_enabled(device, on),
        )
        self._capture(
            torch.get_autocast_dtype(device),
            lambda: torch.get_autocast_dtype(device),
            lambda dtype: torch.set_autocast_dtype(device, dtype),
        )


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


_BACKENDS: Any = torch.backends  # its attributes have no type hints
_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    (numpy.geterr, lambda errors: numpy.seterr(**errors)),
    (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    # Precisions. The older settings come first, because they write the newer ones; of the newer
    # ones the general setting comes first, because the others follow it.
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


def _capture_hooks(hooks: dict[Any, Any]) -> Callable[[], None]:
    before = dict(hooks)

    def restore() -> None:
        hooks.clear()
        hooks.update(before)

    return restore
