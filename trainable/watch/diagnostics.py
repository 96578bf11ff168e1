"""Measure a run: gradient norms by layer, throughput, memory, time on the device, use of a GPU.

What must not live here: anything that changes the training.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

MEASURED = frozenset(
    {
        "train/samples_per_second",
        "train/seconds",
        "train/device_seconds",
        "memory/process_mb",
        "memory/gpu_mb",
        "gpu/utilization_percent",
        "gpu/memory_percent",
    }
)
"""Metrics that a clock or the operating system measures. They differ between any two runs and are
left out where runs are compared bit for bit."""

_STATM = Path("/proc/self/statm")  # in pages: size, resident, shared, ...


class LayerNorms:
    """Compute one gradient norm per layer from the norms of single gradients.

    A layer is the module that owns a parameter: a weight and its bias are in one layer. Its name
    is the module's path and class: `net.02 Linear`.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self._parameters = parameters
        self._layers = [_layer(model, names.get(id(p))) for p in parameters]

    def present(self) -> list[str]:
        """Return the layer of each parameter that has a gradient now."""
        return [
            layer
            for layer, p in zip(self._layers, self._parameters, strict=True)
            if p.grad is not None
        ]

    @staticmethod
    def metrics(layers: Sequence[str], norms: Sequence[float], weight: float) -> dict[str, float]:
        """Return `grad_norm/<layer>` of the mean gradient."""
        squares: dict[str, float] = {}
        for layer, norm in zip(layers, norms, strict=True):
            squares[layer] = squares.get(layer, 0.0) + (norm / weight) ** 2
        return {f"grad_norm/{layer}": math.sqrt(square) for layer, square in squares.items()}


class Throughput:
    """Samples per second of training time, without evaluation and saving."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples = 0
        self._seconds = 0.0
        self._started: float | None = None
        self.seconds = 0.0
        """Training time between the last two readings."""

    def start(self) -> None:
        """Start the clock."""
        self._started = self._clock()

    def count(self, samples: int) -> None:
        """Add to the number of trained samples."""
        self._samples += samples

    def read(self) -> float:
        """Stop the clock; return samples per second since the last reading, 0 without any."""
        if self._started is not None:
            self._seconds += self._clock() - self._started
            self._started = None
        rate = self._samples / self._seconds if self._seconds > 0 else 0.0
        self.seconds = self._seconds
        self._samples, self._seconds = 0, 0.0
        return rate


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return the memory of this process, and of its tensors on a GPU, in MiB; does not wait."""
    found = {}
    if _STATM.exists():
        pages = int(_STATM.read_bytes().split()[1])
        found["memory/process_mb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    if device.type == "cuda":
        found["memory/gpu_mb"] = torch.cuda.memory_allocated(device) / 2**20
    return found


def memory_since_report(device: torch.device) -> dict[str, float]:
    """Return `memory_in_use`, with the peak since the last call as `memory/gpu_mb`."""
    found = memory_in_use(device)
    if device.type == "cuda":
        found["memory/gpu_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
    return found


class DeviceTime:
    """Measure the seconds in which the device computes steps.

    Each measurement waits for the device before and after a step, so the host cannot queue the
    next step meanwhile. It is therefore off by default.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Add the time that the device computes inside the context."""
        started = self._wait()
        try:
            yield
        finally:
            self._seconds += self._wait() - started

    def read(self) -> float:
        """Return the seconds since the last reading."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _wait(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # device synchronisation, on request
        return self._clock()


class GpuUse:
    """Sample how busy a GPU is, and how much of its memory this process has.

    It asks the driver (NVML), not the device: no step waits for it. NVML counts the time in which
    a kernel of any process ran. A part of a GPU (MIG) has no such count: nothing is measured.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.monotonic) -> None:
        self._gpu, self._clock, self._last = open_gpu(device), clock, -math.inf
        self._busy: list[float] = []

    def sample(self) -> None:
        """Ask how busy the GPU has been, at most once a second."""
        if self._gpu is None or self._clock() - self._last < _GPU_SECONDS:
            return
        import pynvml

        self._last = self._clock()
        try:
            self._busy.append(float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu))
        except pynvml.NVMLError:
            self._gpu = None

    def read(self) -> dict[str, float]:
        """Return the mean since the last reading, and the memory now, in percent of the GPU."""
        self.sample()
        busy, self._busy = self._busy, []
        if self._gpu is None:
            return {}
        found = {"gpu/utilization_percent": fmean(busy)} if busy else {}
        import pynvml

        total = pynvml.nvmlDeviceGetMemoryInfo(self._gpu).total
        if (used := memory_of_process(self._gpu)) is not None:
            found["gpu/memory_percent"] = 100 * used / total
        return found


_GPU_SECONDS = 1.0
"""NVML's own count spans up to a second."""


def open_gpu(device: torch.device) -> Any | None:
    """Return NVML's handle of a CUDA device; None without a driver, and for a part of a GPU."""
    if device.type != "cuda":
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


def memory_of_process(gpu: Any) -> int | None:
    """Return the bytes of a GPU that this process has, by its handle of NVML.

    None in a container with its own process numbers, and with a driver that does not say it.
    """
    import pynvml

    try:
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError:
        pass
    return None


def _layer(model: nn.Module, name: str | None) -> str:
    """Return the path and the class of the module that has a parameter."""
    if name is None:
        return "outside the model"  # a task may train other parameters, such as those of a loss
    module, path = model, ""
    for part in name.split(".")[:-1]:
        is_list = isinstance(module, nn.Sequential | nn.ModuleList)
        width = len(str(len([*module.children()]) - 1)) if is_list else 0
        path += f"{path and '.'}{part.zfill(width)}"  # names sort as layers do
        module = module.get_submodule(part)
    return f"{path} {_own_class(module).__name__}".lstrip()


def _own_class(module: nn.Module) -> type:
    """Return a module's class as its author wrote it; sharding derives one from it."""
    kinds = type(module).__mro__
    return kinds[2] if kinds[1].__name__ == "FSDPModule" else kinds[0]
