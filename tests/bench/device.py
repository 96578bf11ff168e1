"""Where the rows that train do so: on the first GPU, or on the CPU where there is none.

`BENCH_DEVICE` names another device. What must not live here: what is measured there.
"""

from __future__ import annotations

import os

import torch

DEVICE = torch.device(
    os.environ.get("BENCH_DEVICE") or ("cuda:0" if torch.cuda.is_available() else "cpu")
)


def wait_for_device() -> None:
    """Return when the device has done what was asked of it: a GPU is handed work ahead."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize(DEVICE)


def device_name() -> str:
    """The name of the GPU, or `the CPU`."""
    return torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "the CPU"
