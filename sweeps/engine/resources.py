"""Find the CPUs, memory and GPUs of a machine, and plan how trials share them.

Without torch and Ray, which take seconds to import, so a spec that asks too much is refused early.
What must not live here: placing trials (Ray does), measuring a step (`check.memory_probe`).
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
from typing import TYPE_CHECKING, Any, Literal

import psutil

from sweeps.errors import Issue, UserError
from sweeps.formatting import format_bytes
from sweeps.spec.searched_workers import WORKERS
from trainable.memory import CONTEXT_BYTES

if TYPE_CHECKING:
    from sweeps.spec.sections import ResourcesConfig
    from sweeps.spec.spec import SweepSpec

# The memory of a trial that was not measured: a CUDA context, libraries and a small model. With
# less, trials that share a GPU run out of memory.
LEAST_GPU_MEMORY = 2 * 1024**3
# A run may need more memory than its first steps: for larger batches if sample sizes differ, and
# for fragmentation.
_MARGIN = 1.2
_SHARES = 10_000  # Ray counts resources in ten-thousandths


class ResourceError(UserError):
    """A trial requests more than any machine has, and would never start."""

    def __init__(self, *path: str, message: str) -> None:
        super().__init__([Issue(path, message)])


class GroupTooLarge(ResourceError):
    """The nodes hold one worker of a trial, and not all of them."""

    def __init__(self, *path: str, what: str, rest: str, fitting: int) -> None:
        super().__init__(*path, message=f"{what}; {rest}")
        self.what, self.fitting = what, fitting


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use; `memory` in bytes."""

    name: str
    memory: int


@dataclass(frozen=True)
class Machine:
    """The resources of one node: whole CPUs, memory in bytes, GPUs."""

    name: str
    cpus: int
    memory: int
    gpus: tuple[Gpu, ...] = ()

    @classmethod
    def probe(cls, environ: Mapping[str, str] | None = None) -> Machine:
        """Return the resources of this machine; takes milliseconds."""
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
    """The GPU memory of a trial's first steps, in bytes.

    Attributes:
        peak: The most that torch's allocator reserved.
        outside: What the process used outside the allocator.
        failed: Why the measurement failed; the other values are then 0.
    """

    peak: int = 0
    outside: int = 0
    total: int = 0
    failed: str | None = None

    @property
    def needed(self) -> int:
        """The memory that a trial gets: its peak with a margin, and the CUDA context."""
        return math.ceil(self.peak * _MARGIN) + max(self.outside, CONTEXT_BYTES)

    def __str__(self) -> str:
        if self.failed:
            return f"one step of the largest known trial {self.failed}"
        return (
            f"one step took {format_bytes(self.peak + self.outside)} of {format_bytes(self.total)}"
        )


@dataclass(frozen=True)
class ResourcePlan:
    """The resources of each trial, and how many trials run at once.

    Attributes:
        cpu: CPUs of each worker of a trial.
        gpu: GPUs of each worker of a trial: a share below 1, or a whole number.
        concurrency: How many trials run at once; where workers are searched, of the largest
            trials.
        because: The measurement behind the share of a GPU; empty without one.
        workers: How many processes one trial has; where that is searched, the most.
        placement: Whether they run on as few nodes as possible, or on as many.
        fewest_workers: The fewest workers of a trial; None: all have as many.
        most_trials: How many trials with the fewest workers run at once; None: `concurrency`.
        capacity: How many workers the nodes hold; None: those of `concurrency` trials.
    """

    cpu: float
    gpu: float
    concurrency: int
    because: str = ""
    workers: int = 1
    placement: Literal["pack", "spread"] = "pack"
    fewest_workers: int | None = None
    most_trials: int | None = None
    capacity: int | None = None

    @property
    def trial_cpus(self) -> float:
        """CPUs of one trial with all of its workers."""
        return self.devices_of(self.workers)[0]

    @property
    def trial_gpus(self) -> float:
        """GPUs of one trial with all of its workers."""
        return self.devices_of(self.workers)[1]

    @property
    def max_concurrency(self) -> int:
        """The most trials that run at once, whatever their numbers of workers."""
        return self.concurrency if self.most_trials is None else self.most_trials

    @property
    def max_workers(self) -> int:
        """The most workers that the running trials may have together."""
        return self.concurrency * self.workers if self.capacity is None else self.capacity

    def devices_of(self, workers: int) -> tuple[float, float]:
        """Return the CPUs and the GPUs of a trial with so many workers."""
        return _whole(self.cpu * workers), _whole(self.gpu * workers)

    def describe(self) -> str:
        """Return a description of the plan for messages."""
        gpu = f", {self.gpu:g} GPU" if self.gpu else ""
        count = _range(self.concurrency, self.max_concurrency)
        at_once = f"{count} trial{'s' if self.max_concurrency != 1 else ''} at a time"
        number = _range(self.fewest_workers or self.workers, self.workers)
        workers = f"{number} workers of " if self.workers > 1 else ""
        cpus = f"{self.cpu:g} CPU{'s' if self.cpu > 1 else ''}"
        because = f": {self.because}" if self.because else ""
        return f"{at_once}, each with {workers}{cpus}{gpu}{because}"


def plan_sweep(
    spec: SweepSpec, nodes: Sequence[Machine], step: StepMemory | None = None
) -> ResourcePlan:
    """Plan the resources of each trial of a sweep on some nodes."""
    trials, workers = spec.max_runs, spec.searched_workers
    return plan(spec.resources, trials, spec.concurrency, nodes, step, workers=workers)


def plan(
    resources: ResourcesConfig,
    trials: int,
    concurrency: int | None,
    machine: Machine | Sequence[Machine],
    step: StepMemory | None = None,
    *,
    workers: tuple[int, int] | None = None,
) -> ResourcePlan:
    """Plan the resources of each trial on this machine, or on the nodes of a cluster."""
    nodes = [machine] if isinstance(machine, Machine) else list(machine)
    cpu = resources.cpu
    least, largest_group = workers or (resources.workers, resources.workers)
    part = "a trial" if largest_group == 1 else "a worker of a trial"
    if not any(node.cpus >= cpu for node in nodes):
        largest = max(nodes, key=lambda node: node.cpus)
        raise ResourceError(
            "resources",
            "cpu",
            message=f"{cpu:g} CPUs are more than any node has; {part} runs on one node, the "
            f"largest is {largest}; write cpu: {largest.cpus} or less",
        )
    most = min(trials, concurrency or trials)
    by_cpu = sum(_fit(node, cpu, 0) for node in nodes)
    if resources.gpu != "auto":
        gpu = resources.gpu
    elif largest_group > 1:  # workers of a trial that share a GPU exchange slowly
        gpu = 1 if any(node.gpus for node in nodes) else 0
    else:
        gpu = _equal_share(nodes, cpu, min(most, by_cpu), step)
    fitting = _num_fitting(nodes, cpu, gpu, part)
    # A trial starts when there is room for all of its workers, on one node or on several.
    if fitting < largest_group:
        raise _too_many_workers(
            nodes, largest_group, fitting, cpu, gpu, searched=workers is not None
        )
    because = str(step) if step is not None else ""
    return ResourcePlan(
        _whole(cpu),
        _whole(gpu),
        min(most, fitting // largest_group),
        because,
        largest_group,
        resources.placement,
        fewest_workers=least if workers else None,
        most_trials=min(most, fitting // least) if workers else None,
        capacity=fitting,  # all workers are alike: each fits where another one does
    )


def _num_fitting(nodes: Sequence[Machine], cpu: float, gpu: float, part: str) -> int:
    """Return how many workers the nodes hold at once."""
    if gpu and not any(_fit(node, 0, gpu) for node in nodes):
        largest = max(nodes, key=lambda node: len(node.gpus))
        fix = (
            f"write gpu: {len(largest.gpus)} or less"
            if largest.gpus
            else "write gpu: auto or gpu: 0"
        )
        raise ResourceError(
            "resources",
            "gpu",
            message=f"{gpu:g} GPU is more than any node has; {part} runs on one node, the "
            f"largest is {largest}; {fix}",
        )
    fitting = sum(_fit(node, cpu, gpu) for node in nodes)
    if not fitting:
        largest = max(nodes, key=lambda node: (len(node.gpus), node.cpus))
        raise ResourceError(
            "resources",
            message=f"{cpu:g} CPUs together with {gpu:g} GPU are more than any node has; {part} "
            f"runs on one node, the largest is {largest}; write cpu: {largest.cpus} or less",
        )
    return fitting


def _too_many_workers(
    nodes: Sequence[Machine],
    workers: int,
    fitting: int,
    cpu: float,
    gpu: float,
    *,
    searched: bool,
) -> GroupTooLarge:
    where = str(nodes[0]) if len(nodes) == 1 else f"the {len(nodes)} nodes together"
    each = f"{cpu:g} CPU{'s' if cpu > 1 else ''}" + (f" and {gpu:g} GPU" if gpu else "")
    remedy = "search" if searched else "write workers:"
    return GroupTooLarge(
        *(("space", WORKERS) if searched else ("resources", "workers")),
        what=f"{workers} workers of {each} each are more than {where} can hold",
        rest=f"a trial starts when all of its workers fit; {remedy} {fitting} or less, or ask for "
        "less with resources.cpu or resources.gpu",
        fitting=fitting,
    )


def _range(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least} to {most}"


def share_of_gpu(needed: int, total: int, wanted: int) -> float:
    """Return the share with which up to `wanted` processes share a GPU equally."""
    least = max(1, -(-needed * _SHARES // total))  # rounded up
    sharing = max(1, min(wanted, _SHARES // least))
    return (_SHARES // sharing) / _SHARES


def usable_cpus() -> int:
    """Return how many CPUs this process may use, by its affinity and its control group's quota."""
    # os.sched_getaffinity exists only on Linux.
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _cgroup_cpus(Path("/sys/fs/cgroup"))
    return max(1, min(count, math.floor(quota))) if quota else count


def visible_gpus(visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show to this process."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # no driver: no GPU

    def describe(handle: Any) -> Gpu:
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Gpu(str(pynvml.nvmlDeviceGetName(handle)), memory)

    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index)
            for index in range(pynvml.nvmlDeviceGetCount())
        ]
        found = [(str(pynvml.nvmlDeviceGetUUID(handle)), describe(handle)) for handle in handles]
        instances = {}
        for entry in (visible or "").split(","):
            if entry.startswith("MIG-"):
                with contextlib.suppress(pynvml.NVMLError):  # it does not exist
                    instances[entry] = describe(pynvml.nvmlDeviceGetHandleByUUID(entry))
        return select_visible(found, visible, instances)
    finally:
        pynvml.nvmlShutdown()


def select_visible(
    found: Sequence[tuple[str, Gpu]],
    visible: str | None,
    instances: Mapping[str, Gpu] = MappingProxyType({}),
) -> tuple[Gpu, ...]:
    """Apply `CUDA_VISIBLE_DEVICES` as CUDA does."""
    if visible is None:
        return tuple(gpu for _, gpu in found)
    known = [*found, *instances.items()]
    chosen: list[int] = []
    for entry in visible.split(","):
        if entry.strip().isdecimal():  # CUDA ignores blanks only around numbers
            match = [int(entry)] if int(entry) < len(found) else []
        else:
            match = [n for n, (uuid, _) in enumerate(known) if entry and uuid.startswith(entry)]
        if len(match) != 1:
            # The first entry that matches no GPU ends the list.
            break
        chosen += match
    # If a GPU is listed twice, CUDA shows none.
    return tuple(known[n][1] for n in chosen) if len({*chosen}) == len(chosen) else ()


def _fit(node: Machine, cpu: float, gpu: float) -> int:
    """Return how many trials one node holds at once."""
    # The small number corrects rounding: 0.3 / 0.1 is 2.9999999999999996.
    by_cpu = math.floor(node.cpus / cpu + 1e-9) if cpu else 2**31
    if gpu == 0:
        return by_cpu
    count = len(node.gpus)
    by_gpu = count * math.floor(1 / gpu + 1e-9) if gpu < 1 else math.floor(count / gpu + 1e-9)
    return min(by_cpu, by_gpu)


def _equal_share(
    nodes: Sequence[Machine], cpu: float, wanted: int, step: StepMemory | None
) -> float:
    """Return a trial's GPU share if `wanted` trials are spread over all GPUs; 0 without GPUs."""
    gpus = [gpu for node in nodes for gpu in node.gpus if node.cpus >= cpu]
    if not gpus:
        return 0
    if step is not None and step.failed:
        return 1  # an out-of-memory error of a sharing trial would have no clear cause
    total = min(gpu.memory for gpu in gpus)
    needed = LEAST_GPU_MEMORY
    if step is not None:  # torch reports a little less than the GPU driver
        total, needed = min(total, step.total), step.needed
    return share_of_gpu(needed, total, math.ceil(wanted / len(gpus)))


def _whole(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def _cgroup_cpus(root: Path) -> float | None:
    """Return the control group's CPU quota (version 2, then version 1); None without one."""
    text = _read(root / "cpu.max")
    if text is not None:
        quota, _, period = text.partition(" ")
        return None if quota == "max" else int(quota) / int(period or "100000")
    first, second = _read(root / "cpu/cpu.cfs_quota_us"), _read(root / "cpu/cpu.cfs_period_us")
    if first is None or second is None or int(first) <= 0:
        return None
    return int(first) / int(second)


def _cgroup_memory(root: Path) -> int | None:
    """Return the control group's memory limit in bytes; None without one."""
    text = _read(root / "memory.max") or _read(root / "memory/memory.limit_in_bytes")
    return None if text is None or text == "max" else int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None  # another version of control groups, or not Linux
