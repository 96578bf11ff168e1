"""What the machine offers, and how trials share it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sweeps.resources import (
    Gpu,
    Machine,
    Plan,
    ResourceError,
    _cgroup_cpus,
    _cgroup_memory,
    plan,
    select_visible,
)
from sweeps.sections import ResourcesConfig

GIB = 1024**3


def _machine(cpus: int = 8, gpus: int = 0, memory: int = 80, name: str = "node") -> Machine:
    return Machine(name, cpus, 64 * GIB, (Gpu("GPU", memory * GIB),) * gpus)


def _ask(cpu: float = 1, gpu: float | str = "auto") -> ResourcesConfig:
    return ResourcesConfig.model_validate({"cpu": cpu, "gpu": gpu})


@pytest.mark.parametrize(
    ("ask", "trials", "concurrency", "machine", "expected"),
    [
        (_ask(), 24, None, _machine(8), Plan(1, 0, 8)),
        (_ask(cpu=3), 24, None, _machine(8), Plan(3, 0, 2)),
        (_ask(cpu=0.5), 24, None, _machine(8), Plan(0.5, 0, 16)),
        (_ask(), 3, None, _machine(8), Plan(1, 0, 3)),
        (_ask(), 24, 2, _machine(8), Plan(1, 0, 2)),
        (_ask(), 24, None, _machine(8, gpus=1), Plan(1, 0.125, 8)),
        (_ask(), 24, 3, _machine(8, gpus=1), Plan(1, 0.3333, 3)),
        (_ask(), 24, 3, _machine(8, gpus=2), Plan(1, 0.5, 3)),
        (_ask(), 24, None, _machine(4, gpus=8), Plan(1, 1, 4)),
        (_ask(), 24, None, _machine(8, gpus=1, memory=6), Plan(1, 0.3333, 3)),
        (_ask(), 24, None, _machine(8, gpus=1, memory=1), Plan(1, 1, 1)),
        (_ask(gpu=0), 24, None, _machine(8, gpus=1), Plan(1, 0, 8)),
        (_ask(gpu=0.3), 24, None, _machine(8, gpus=2), Plan(1, 0.3, 6)),
        (_ask(gpu=0.1), 24, None, _machine(16, gpus=1), Plan(1, 0.1, 10)),
        (_ask(gpu=2), 24, None, _machine(8, gpus=5), Plan(1, 2, 2)),
        (_ask(cpu=2), 24, None, [_machine(8), _machine(3)], Plan(2, 0, 5)),
        (_ask(gpu=1), 24, None, [_machine(8), _machine(2, gpus=4)], Plan(1, 1, 2)),
    ],
)
def test_plans(
    ask: ResourcesConfig,
    trials: int,
    concurrency: int | None,
    machine: Machine | list[Machine],
    expected: Plan,
) -> None:
    assert plan(ask, trials, concurrency, machine) == expected


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
    ],
)
def test_an_ask_that_nothing_can_meet(
    ask: ResourcesConfig, machine: Machine | list[Machine], message: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        plan(ask, 24, None, machine)
    assert str(caught.value) == message


def test_equal_shares_never_exceed_a_gpu() -> None:
    for trials in range(1, 40):
        made = plan(_ask(), trials, None, _machine(64, gpus=3))
        per_gpu = -(-made.concurrency // 3)
        assert made.concurrency == trials
        assert made.gpu * per_gpu <= 1


def test_a_plan_in_words() -> None:
    assert Plan(1, 0.25, 4).describe() == "4 trials at a time, each with 1 CPU, 0.25 GPU"
    assert Plan(2, 0, 1).describe() == "1 trial at a time, each with 2 CPUs"


FOUND = [("GPU-aa1", Gpu("a", 1)), ("GPU-ab2", Gpu("b", 1)), ("GPU-c3", Gpu("c", 1))]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, "abc"),
        ("", ""),
        ("-1", ""),
        ("2,0", "ca"),
        ("0, 1", "ab"),
        ("0,7,1", "a"),
        ("GPU-c", "c"),
        ("GPU-ab2,0", "ba"),
        ("GPU-a", ""),
        ("NoDevFiles", ""),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible: str | None, names: str) -> None:
    assert "".join(gpu.name for gpu in select_visible(FOUND, visible)) == names


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


def test_this_machine() -> None:
    machine = Machine.probe({"CUDA_VISIBLE_DEVICES": ""})
    assert 1 <= machine.cpus <= (os.cpu_count() or 1)
    assert machine.memory > GIB // 4
    assert machine.gpus == ()
