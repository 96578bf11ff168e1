"""The resources of the machine, and how trials share them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.engine.resources import (
    Gpu,
    Machine,
    ResourceError,
    ResourcePlan,
    StepMemory,
    _cgroup_cpus,
    _cgroup_memory,
    plan,
    select_visible,
    share_of_gpu,
    visible_gpus,
)
from sweeps.spec.sections import ResourcesConfig
from trainable.memory import CONTEXT_BYTES, tensor_fraction

GIB = 1024**3


def _machine(cpus: int = 8, gpus: int = 0, memory: int = 80, name: str = "node") -> Machine:
    return Machine(name, cpus, 64 * GIB, (Gpu("GPU", memory * GIB),) * gpus)


def _ask(cpu: float = 1, gpu: float | str = "auto", **more: object) -> ResourcesConfig:
    return ResourcesConfig.model_validate({"cpu": cpu, "gpu": gpu, **more})


@pytest.mark.parametrize(
    ("ask", "trials", "concurrency", "machine", "expected"),
    [
        (_ask(), 24, None, _machine(8), ResourcePlan(1, 0, 8)),
        (_ask(cpu=0.5), 24, None, _machine(8), ResourcePlan(0.5, 0, 16)),
        (_ask(), 24, 2, _machine(8), ResourcePlan(1, 0, 2)),
        (_ask(), 24, None, _machine(8, gpus=1), ResourcePlan(1, 0.125, 8)),
        (_ask(), 24, 3, _machine(8, gpus=2), ResourcePlan(1, 0.5, 3)),
        (_ask(), 24, None, _machine(4, gpus=8), ResourcePlan(1, 1, 4)),
        (_ask(), 24, None, _machine(8, gpus=1, memory=7), ResourcePlan(1, 0.3333, 3)),
        (_ask(), 24, None, _machine(8, gpus=1, memory=1), ResourcePlan(1, 1, 1)),
        (_ask(gpu=0), 24, None, _machine(8, gpus=1), ResourcePlan(1, 0, 8)),
        (_ask(gpu=0.3), 24, None, _machine(8, gpus=2), ResourcePlan(1, 0.3, 6)),
        (_ask(gpu=2), 24, None, _machine(8, gpus=5), ResourcePlan(1, 2, 2)),
        (_ask(cpu=2), 24, None, [_machine(8), _machine(3)], ResourcePlan(2, 0, 5)),
        (_ask(gpu=1), 24, None, [_machine(8), _machine(2, gpus=4)], ResourcePlan(1, 1, 2)),
    ],
)
def test_plans(
    ask: ResourcesConfig,
    trials: int,
    concurrency: int | None,
    machine: Machine | list[Machine],
    expected: ResourcePlan,
) -> None:
    assert replace(plan(ask, trials, concurrency, machine), capacity=None) == expected


@pytest.mark.parametrize(
    ("ask", "machine", "message"),
    [
        (
            _ask(gpu=0.3),
            _machine(2),
            "resources.gpu: 0.3 GPU is more than any node has; a trial runs on one node, "
            "the largest is node (2 CPUs, no GPU); write gpu: auto or gpu: 0",
        ),
        (
            _ask(gpu=4),
            [_machine(2, gpus=2, name="big"), _machine(2, gpus=1)],
            "resources.gpu: 4 GPU is more than any node has; a trial runs on one node, "
            "the largest is big (2 CPUs, 2 GPUs); write gpu: 2 or less",
        ),
        (
            _ask(cpu=16),
            [_machine(2), _machine(8, name="big")],
            "resources.cpu: 16 CPUs are more than any node has; a trial runs on one node, "
            "the largest is big (8 CPUs, no GPU); write cpu: 8 or less",
        ),
        (
            _ask(cpu=4, gpu=1),
            [_machine(8, name="cpus"), _machine(2, gpus=1, name="gpus")],
            "resources: 4 CPUs together with 1 GPU are more than any node has; a trial runs on "
            "one node, the largest is gpus (2 CPUs, 1 GPU); write cpu: 2 or less",
        ),
        (
            _ask(workers=3),
            _machine(8, gpus=2),
            "resources.workers: 3 workers of 1 CPU and 1 GPU each are more than node (8 CPUs, 2 "
            "GPUs) can hold; a trial starts when all of its workers fit; write workers: 2 or "
            "less, or ask for less with resources.cpu or resources.gpu",
        ),
        (
            _ask(cpu=2, workers=4),
            [_machine(3), _machine(5)],
            "resources.workers: 4 workers of 2 CPUs each are more than the 2 nodes together can "
            "hold; a trial starts when all of its workers fit; write workers: 3 or less, or ask "
            "for less with resources.cpu or resources.gpu",
        ),
    ],
)
def test_impossible_request(
    ask: ResourcesConfig, machine: Machine | list[Machine], message: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        plan(ask, 24, None, machine)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("ask", "machine", "gpu", "concurrency"),
    [
        (_ask(workers=2), _machine(8), 0, 4),
        (_ask(workers=3), _machine(8), 0, 2),  # two CPUs stay free: no half of a trial
        (_ask(cpu=2, workers=2), [_machine(3), _machine(3), _machine(3)], 0, 1),
        (_ask(workers=2), [_machine(1), _machine(1), _machine(2)], 0, 2),
        (_ask(workers=2), _machine(8, gpus=4), 1, 2),  # auto: a whole GPU for each worker
        (_ask(gpu=0.5, workers=2), _machine(8, gpus=3), 0.5, 3),
    ],
)
def test_whole_groups_are_counted(
    ask: ResourcesConfig, machine: Machine | list[Machine], gpu: float, concurrency: int
) -> None:
    made = plan(ask, 24, None, machine)
    assert (made.gpu, made.concurrency, made.workers) == (gpu, concurrency, ask.workers)
    assert made.trial_cpus == ask.cpu * ask.workers
    assert made.trial_gpus == gpu * ask.workers


@pytest.mark.parametrize(
    ("searched", "concurrency", "machine", "expected"),
    [
        ((1, 4), None, _machine(8), (2, 8, 8)),
        ((1, 3), None, _machine(8), (2, 8, 8)),
        ((2, 3), None, [_machine(3), _machine(4)], (2, 3, 7)),
        ((1, 4), 3, _machine(8), (2, 3, 8)),
        ((1, 2), None, _machine(8, gpus=4), (2, 4, 4)),
    ],
)
def test_searched_workers_fill_the_machine(
    searched: tuple[int, int],
    concurrency: int | None,
    machine: Machine | list[Machine],
    expected: tuple[int, int, int],
) -> None:
    made = plan(_ask(), 24, concurrency, machine, workers=searched)
    assert (made.concurrency, made.max_concurrency, made.max_workers) == expected
    assert made.workers == searched[1]
    assert made.devices_of(1) == (1, made.gpu)


def _step(peak: float, outside: float = 0.5, total: float = 80) -> StepMemory:
    return StepMemory(int(peak * GIB), int(outside * GIB), int(total * GIB))


@pytest.mark.parametrize(
    ("step", "gpus", "expected"),
    [
        (_step(1), 1, (0.125, 8)),  # all that the CPUs allow
        (_step(15), 1, (0.25, 4)),  # 18.75 GiB with the margin and the context
        (_step(15), 2, (0.25, 8)),
        (_step(33), 1, (1, 1)),  # 40.35 GiB: the tensors of two would fit, not their contexts
        (_step(15, outside=3), 1, (0.3333, 3)),
        (_step(15, total=74), 1, (0.3333, 3)),  # torch sees less of it than the driver
        (_step(200), 1, (1, 1)),
        (StepMemory(failed="ran out of memory"), 2, (1, 2)),
    ],
)
def test_step_memory_decides_how_many_share_a_gpu(
    step: StepMemory, gpus: int, expected: tuple[float, int]
) -> None:
    made = plan(_ask(), 24, None, _machine(8, gpus=gpus), step)
    assert (made.gpu, made.concurrency) == expected


@given(
    peak=st.integers(1, 2**38),
    outside=st.integers(0, 2**31),
    total=st.integers(2**31, 2**38),
    wanted=st.integers(1, 100),  # of more, Ray counts in steps that are too coarse
)
def test_shares_fit_a_gpu_and_a_step(peak: int, outside: int, total: int, wanted: int) -> None:
    step = StepMemory(peak, outside, total)
    share = share_of_gpu(step.needed, total, wanted)
    sharing = min(wanted, _fitting(share))
    assert sharing == wanted or share == 10_000 // sharing / 10_000, "Ray would place more or less"
    assert share == 1 or step.needed <= share * total * (1 + 1e-12)
    if sharing > 1:  # nobody outgrows a share that fits, and all of them fit together
        tensors = tensor_fraction(share, total) * total
        assert 1.19 * peak <= tensors
        context = CONTEXT_BYTES if share * total > 2 * CONTEXT_BYTES else 0
        assert sharing * (tensors + context) <= total * (1 + 1e-9)
    # one more would not fit, or is not wanted
    smaller = 10_000 // (sharing + 1) / 10_000
    assert sharing == wanted or smaller * total < step.needed


def _fitting(share: float) -> int:
    """How many of a share Ray places on one GPU: it counts in ten-thousandths."""
    return 10_000 // round(share * 10_000)


FOUND = [("GPU-aa1", Gpu("a", 1)), ("GPU-ab2", Gpu("b", 1)), ("GPU-c3", Gpu("c", 1))]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "abc"),
        ("", ""),
        ("2,0", "ca"),
        ("0,7,1", "a"),
        ("GPU-c", "c"),
        ("GPU-ab2,0", "ba"),
        ("GPU-a", ""),
        ("GPU-c, GPU-ab2", "c"),
        ("1,0,1", ""),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, names: str) -> None:
    assert "".join(gpu.name for gpu in select_visible(FOUND, visible)) == names


class _Driver:
    """What NVML tells of one GPU that was cut into instances, of which one is ours."""

    NVMLError = ValueError
    UUIDS = ("GPU-a", "MIG-1a/2", "MIG-3")

    nvmlInit = nvmlShutdown = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 1)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetHandleByUUID = staticmethod(UUIDS.index)  # a ValueError where there is none
    nvmlDeviceGetName = staticmethod(lambda handle: ("whole", "slice", "other")[handle])
    nvmlDeviceGetUUID = staticmethod(lambda handle: _Driver.UUIDS[handle])
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=80 >> 2 * handle))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, [("whole", 80)]),
        ("0", [("whole", 80)]),
        ("MIG-1a/2", [("slice", 20)]),
        ("MIG-3,MIG-1a/2", [("other", 5), ("slice", 20)]),
        ("MIG-3,MIG-4,MIG-1a/2", [("other", 5)]),
        ("MIG-3,MIG-3", []),
        ("1", []),
    ],
)
def test_named_mig_instance_is_a_gpu(
    visible: str | None, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Driver)  # type: ignore[arg-type]
    assert visible_gpus(visible) == tuple(Gpu(*one) for one in expected)


def test_the_control_group_bounds_the_cpus(tmp_path: Path) -> None:
    assert _cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("350000\n")
    assert _cgroup_cpus(tmp_path) == 3.5
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _cgroup_cpus(tmp_path) is None
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert _cgroup_cpus(tmp_path) == 2


def test_the_control_group_bounds_the_memory(tmp_path: Path) -> None:
    assert _cgroup_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert _cgroup_memory(tmp_path) is None
    (tmp_path / "memory.max").write_text("1048576\n")
    assert _cgroup_memory(tmp_path) == 1048576
