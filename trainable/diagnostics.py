"""What a run tells about itself: gradient norms by layer, throughput, memory, time on the device.

What must not live here: anything that changes the training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

MEASURED = frozenset(
    {
        "train/samples_per_second",
        "train/seconds",
        "train/device_seconds",
        "memory/process_mb",
        "memory/gpu_mb",
    }
)
"""Metrics that a clock or the operating system measured: no two runs have them alike, so they are
left out wherever runs are compared bit for bit."""

_STATM = Path("/proc/self/statm")  # in pages: size, resident, shared, ...


class LayerNorms:
    """Turns the norms of single gradients into one norm for each layer.

    A layer is the module that owns a parameter, so a weight and its bias count together.

    Args:
        model: Gives the names.
        parameters: The parameters in the order in which their gradients are measured.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        names = {id(p): name for name, p in model.named_parameters()}
        self._parameters = parameters
        self._layers = [_layer(names.get(id(p))) for p in parameters]

    def present(self) -> list[str]:
        """Return the layer of each parameter that has a gradient now."""
        return [
            layer
            for layer, p in zip(self._layers, self._parameters, strict=True)
            if p.grad is not None
        ]

    @staticmethod
    def metrics(layers: Sequence[str], norms: Sequence[float], weight: float) -> dict[str, float]:
        """Return `grad_norm/<layer>` of the mean gradient.

        Args:
            layers: The layer of each gradient.
            norms: L2 norm of each gradient of the summed loss.
            weight: What the gradients are divided by.
        """
        squares: dict[str, float] = {}
        for layer, norm in zip(layers, norms, strict=True):
            squares[layer] = squares.get(layer, 0.0) + (norm / weight) ** 2
        return {f"grad_norm/{layer}": math.sqrt(square) for layer, square in squares.items()}


class Throughput:
    """Samples per second of training time since the last reading; evaluation and saving do not
    count.

    Args:
        clock: Seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._samples = 0
        self._seconds = 0.0
        self._started: float | None = None
        self.seconds = 0.0
        """Training time between the two last readings."""

    def start(self) -> None:
        """Training goes on."""
        self._started = self._clock()

    def count(self, samples: int) -> None:
        """Samples were trained on."""
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
    """Return what this run holds now, in MiB; costs some microseconds and waits for no device.

    `memory/process_mb` is the resident memory of this process, without its loader's processes,
    where the system tells it as Linux does; `memory/gpu_mb` what its tensors take of `device`,
    where that is a GPU. Both are this run's own, whatever else the machine does.
    """
    found = {}
    if _STATM.exists():
        pages = int(_STATM.read_bytes().split()[1])
        found["memory/process_mb"] = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    if device.type == "cuda":
        found["memory/gpu_mb"] = torch.cuda.memory_allocated(device) / 2**20
    return found


def memory_since_report(device: torch.device) -> dict[str, float]:
    """Return `memory_in_use`, with the most that this run's tensors took since the last call as
    `memory/gpu_mb`: between two steps a device holds less than what decides whether a trial fits.
    """
    found = memory_in_use(device)
    if device.type == "cuda":
        found["memory/gpu_mb"] = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
    return found


class DeviceTime:
    """Seconds spent computing steps, the rest being data loading and bookkeeping.

    A step is measured from an idle device to an idle device. That is why it is done on request
    only: a device that is waited for after each step cannot be handed the next one meanwhile.

    Args:
        device: Where the steps are computed; on a CPU, computing is never asynchronous.
        clock: Seconds that only go forward.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the time that the device takes for what is computed inside."""
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


def _layer(name: str | None) -> str:
    if name is None:
        return "(outside the model)"  # a task may train parameters of its own, such as a loss's
    module, dot, _ = name.rpartition(".")
    return module if dot else "(model)"
