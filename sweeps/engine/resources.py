"""What the machine has, and how trials share it.

Neither torch nor Ray is asked: both take seconds to import, and a spec that asks for too much is
refused before. What must not live here: placing trials (Ray does), measuring what a step takes
(`trainable.memory_probe`), and the cap on a trial's GPU memory (the trial sets it).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import psutil

from sweeps.errors import Issue, UserError
from sweeps.formatting import format_bytes
from trainable.memory import CONTEXT_BYTES

if TYPE_CHECKING:
    from sweeps.config.spec import ResourcesConfig

# Where it was not measured: a context, its libraries' work space and a small model; below this,
# packing ends out of memory.
LEAST_GPU_MEMORY = 2 * 1024**3
# What a whole run takes beyond its first steps: larger batches of samples that differ in size, and
# memory in pieces too small to be used.
_MARGIN = 1.2
_SHARES = 10_000  # Ray counts resources in ten-thousandths


class ResourceError(UserError):
    """A trial asks for more than any machine has; it would wait for ever.

    Args:
        key: What of `resources` asks for it; none: all of it together.
        message: What it is; the rule; what to write instead.
    """

    def __init__(self, *key: str, message: str) -> None:
        super().__init__([Issue(("resources", *key), message)])


@dataclass(frozen=True)
class Gpu:
    """One GPU that this process may use; `memory` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """What one node offers to this process: whole CPUs, memory in bytes, GPUs."""

    name: str
    cpus: int
    memory: int
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def probe(cls, environ: Mapping[str, str] | None = None) -> Machine:
        """Look at this machine; takes milliseconds.

        Args:
            environ: Where `CUDA_VISIBLE_DEVICES` is looked up; default: the process environment.
        """
        environ = os.environ if environ is None else environ
        memory = psutil.virtual_memory().total
        limit = _cgroup_memory(Path("/sys/fs/cgroup"))
        return cls(
            name=socket.gethostname(),
            cpus=usable_cpus(),
            memory=min(memory, limit or memory),
            gpus=visible_gpus(environ.get("CUDA_VISIBLE_DEVICES")),
        )

    def __str__(self) -> str:
        cpus = f"{self.cpus} CPU{'s' if self.cpus != 1 else ''}"
        gpus = (
            f"{len(self.gpus)} GPU{'s' if len(self.gpus) != 1 else ''}" if self.gpus else "no GPU"
        )
        return f"{self.name} ({cpus}, {gpus})"


@dataclass(frozen=True)
class StepMemory:
    """What of a GPU the first steps of a trial took, in bytes.

    Attributes:
        peak: The most that its tensors took, with what torch's allocator keeps beside them.
        outside: What the process took beside that.
        total: The GPU's memory.
        failed: Why nothing is known; the others are 0 then.
    """

    peak: int = 0
    outside: int = 0
    total: int = 0
    failed: str | None = None

    @property
    def needed(self) -> int:
        """The memory that a trial is given: its peak with a margin, and room for the context."""
        return math.ceil(self.peak * _MARGIN) + max(self.outside, CONTEXT_BYTES)

    def __str__(self) -> str:
        if self.failed:
            return f"one step of the largest trial that is known {self.failed}"
        return (
            f"one step took {format_bytes(self.peak + self.outside)} of {format_bytes(self.total)}"
        )


@dataclass(frozen=True)
class ResourcePlan:
    """What each trial gets, and how many run at once.

    Attributes:
        cpu: CPUs of each.
        gpu: GPUs of each: a share below 1, or a whole number.
        concurrency: How many run at once.
        because: Where the share of a GPU comes from, if not from the number of trials alone.
    """

    cpu: float
    gpu: float
    concurrency: int
    because: str = ""

    def describe(self) -> str:
        """Return the plan in words, for a person."""
        gpu = f", {self.gpu:g} GPU" if self.gpu else ""
        at_once = f"{self.concurrency} trial{'s' if self.concurrency != 1 else ''} at a time"
        cpus = f"{self.cpu:g} CPU{'s' if self.cpu > 1 else ''}"
        because = f": {self.because}" if self.because else ""
        return f"{at_once}, each with {cpus}{gpu}{because}"


def plan(
    resources: ResourcesConfig,
    trials: int,
    concurrency: int | None,
    machine: Machine | Sequence[Machine],
    step: StepMemory | None = None,
) -> ResourcePlan:
    """Turn the spec's `resources` into numbers for this machine, or for the nodes of a cluster.

    Args:
        resources: What one trial asks for.
        trials: Trials of the sweep; more never run at once.
        concurrency: The spec's limit, None: as many as fit.
        machine: One machine, or every node.
        step: What of a GPU a trial takes, where that was measured; `gpu: auto` then packs no more
            trials than fit.

    Raises:
        ResourceError: No node can run even one trial.
    """
    nodes = [machine] if isinstance(machine, Machine) else list(machine)
    cpu = resources.cpu
    if not any(node.cpus >= cpu for node in nodes):
        largest = max(nodes, key=lambda node: node.cpus)
        raise ResourceError(
            "cpu",
            message=f"{cpu:g} CPUs are more than any node has; a trial runs on one node, the "
            f"largest is {largest}; write cpu: {largest.cpus} or less",
        )
    most = min(trials, concurrency or trials)
    by_cpu = sum(_fit(node, cpu, 0) for node in nodes)
    wanted = min(most, by_cpu)
    gpu = _equal_share(nodes, cpu, wanted, step) if resources.gpu == "auto" else resources.gpu
    if gpu and not any(_fit(node, 0, gpu) for node in nodes):
        largest = max(nodes, key=lambda node: len(node.gpus))
        fix = (
            f"write gpu: {len(largest.gpus)} or less"
            if largest.gpus
            else "write gpu: auto or gpu: 0"
        )
        raise ResourceError(
            "gpu",
            message=f"{gpu:g} GPU is more than any node has; a trial runs on one node, the "
            f"largest is {largest}; {fix}",
        )
    fitting = sum(_fit(node, cpu, gpu) for node in nodes)
    if not fitting:
        largest = max(nodes, key=lambda node: (len(node.gpus), node.cpus))
        raise ResourceError(
            message=f"{cpu:g} CPUs together with {gpu:g} GPU are more than any node has; a trial "
            f"runs on one node, the largest is {largest}; write cpu: {largest.cpus} or less"
        )
    because = str(step) if step is not None else ""
    return ResourcePlan(_whole(cpu), _whole(gpu), min(most, fitting), because)


def share_of_gpu(needed: int, total: int, wanted: int) -> float:
    """Return the share with which up to `wanted` processes share a GPU equally.

    Args:
        needed: Memory that each must have, in bytes.
        total: The GPU's memory in bytes.
        wanted: How many there would be if memory did not matter, at least 1.

    Returns:
        1 / n, rounded down to what Ray counts in, so that n of them never exceed the GPU; n is the
        largest number up to `wanted` of which each has what it needs, or 1 where nobody has.
    """
    least = max(1, -(-needed * _SHARES // total))  # rounded up
    sharing = max(1, min(wanted, _SHARES // least))
    return (_SHARES // sharing) / _SHARES


def usable_cpus() -> int:
    """Return the CPUs this process may use: affinity and the control group's quota, rounded
    down."""
    # os.sched_getaffinity exists on Linux alone.
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_cpus(Path("/sys/fs/cgroup"))
    return max(1, min(count, math.floor(quota))) if quota else count


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show to this process.

    Args:
        visible: The value of `CUDA_VISIBLE_DEVICES`, None when it is not set.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver: no GPU

    def told(handle: Any) -> Gpu:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Gpu(str(pynvml.nvmlDeviceGetName(handle)), memory)

    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        found = [(str(pynvml.nvmlDeviceGetUUID(handle)), told(handle)) for handle in handles]
        instances = {}
        for entry in (visible or "").split(","):
            if entry.startswith("MIG-"):
                with contextlib.suppress(pynvml.NVMLError):  # there is none
                    instances[entry] = told(pynvml.nvmlDeviceGetHandleByUUID(entry))
        return select_visible(found, visible, instances)
    finally:
        pynvml.nvmlShutdown()


def select_visible(
    found: Sequence[tuple[str, Gpu]],
    visible: str | None,
    instances: Mapping[str, Gpu] = MappingProxyType({}),
) -> tuple[Gpu, ...]:
    """Apply `CUDA_VISIBLE_DEVICES` the way CUDA does: the first entry that names no GPU ends the
    list, and one that is named twice makes it empty.

    Args:
        found: Unique id and GPU, in the driver's order.
        visible: Indices or (beginnings of) unique ids with commas between; None: all.
        instances: By unique id, parts into which a GPU was cut (MIG) and which are named.
    """
    if visible is None:
        return tuple(gpu for _, gpu in found)
    known = [*found, *instances.items()]
    chosen: list[int] = []
    for entry in visible.split(","):
        if entry.strip().isdecimal():  # blanks beside numbers alone are none to CUDA
            match = [int(entry)] if int(entry) < len(found) else []
        else:
            match = [n for n, (uuid, _) in enumerate(known) if entry and uuid.startswith(entry)]
        if len(match) != 1:
            break
        chosen += match
    return tuple(known[n][1] for n in chosen) if len({*chosen}) == len(chosen) else ()


def _fit(node: Machine, cpu: float, gpu: float) -> int:
    """Return how many trials one node holds at once."""
    # The small number: 1 / 0.3333 is meant to be 3, and 0.3 / 0.1 is 2.9999999999999996.
    by_cpu = math.floor(node.cpus / cpu + 1e-9) if cpu else 2**31
    if gpu == 0:
        return by_cpu
    count = len(node.gpus)
    by_gpu = count * math.floor(1 / gpu + 1e-9) if gpu < 1 else math.floor(count / gpu + 1e-9)
    return min(by_cpu, by_gpu)


def _equal_share(
    nodes: Sequence[Machine], cpu: float, wanted: int, step: StepMemory | None
) -> float:
    """Return the share with which `wanted` trials spread evenly over all GPUs; 0 without one."""
    gpus = [gpu for node in nodes for gpu in node.gpus if node.cpus >= cpu]
    if not gpus:
        return 0
    if step is not None and step.failed:
        return 1  # who shares could not be told from who does not fit
    total = min(gpu.memory for gpu in gpus)
    needed = LEAST_GPU_MEMORY
    if step is not None:  # torch finds a little less than the driver tells
        total, needed = min(total, step.total), step.needed
    return share_of_gpu(needed, total, math.ceil(wanted / len(gpus)))


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _cgroup_cpus(root: Path) -> float | None:
    """Return the control group's CPU quota (version 2, then version 1), None without one."""
    text = _read(root / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or "100000")
    first, second = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if first is None or second is None or int(first) <= 0:
        return None
    return int(first) / int(second)


def _cgroup_memory(root: Path) -> int | None:
    """Return the control group's memory limit in bytes, None without one."""
    text = _read(root / "memory.max") or _read(root / "memory/memory.limit_in_bytes")
    return None if text is None or text == "max" else int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None  # not this version of control groups, or not Linux
