"""How a GPU is used, by a stand-in for NVML; `tests/gpu` asks the real one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trainable import open_trainer
from trainable.config import TrialConfig
from trainable.task import Data, Task
from trainable.watch import diagnostics
from trainable.watch.diagnostics import GpuUse


class FakeNvml:
    """NVML with one GPU, as `nvidia-ml-py` answers: handles, objects with fields, one error."""

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.busy = [10, 30, 20]
        self.processes = [SimpleNamespace(pid=1, usedGpuMemory=9), _own(2 * 2**30)]

    def nvmlInit(self) -> None:
        self.opened.append("driver")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        if uuid != "GPU-0a1b":
            raise self.NVMLError("Not Found")
        self.opened.append(uuid)
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> SimpleNamespace:
        assert handle == "GPU-0a1b"
        if not self.busy:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy.pop(0), memory=3)

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:
        assert handle == "GPU-0a1b"
        return SimpleNamespace(total=8 * 2**30, used=5 * 2**30, free=3 * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:
        assert handle == "GPU-0a1b"
        return self.processes


def _own(memory: int | None) -> SimpleNamespace:
    return SimpleNamespace(pid=os.getpid(), usedGpuMemory=memory)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    made = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", made)  # type: ignore[arg-type]
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0a1b")
    )
    return made


def test_use_of_a_gpu_is_the_mean_of_samples_a_second_apart(nvml: FakeNvml) -> None:
    now = [0.0]
    use = GpuUse(torch.device("cuda:0"), lambda: now[0])
    assert nvml.opened == ["driver", "GPU-0a1b"]
    for now[0] in (0.0, 0.3, 0.9, 1.0, 1.9):
        use.sample()
    assert use.read() == {"gpu/utilization_percent": 20.0, "gpu/memory_percent": 25.0}
    now[0] = 3.0
    assert use.read()["gpu/utilization_percent"] == 20.0
    nvml.processes = [_own(None)]
    assert use.read() == {}, "no sample since, and a driver that does not tell the memory"
    now[0] = 5.0
    use.sample()  # the driver answers no longer
    assert use.read() == {}


def test_nothing_is_measured_without_a_gpu_that_nvml_knows(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert GpuUse(torch.device("cpu")).read() == {}
    assert nvml.opened == []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="a slice")
    )
    assert GpuUse(torch.device("cuda:0")).read() == {}


class Small(Task):
    def build_model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def build_data(self) -> Data:
        inputs, targets = torch.ones(8, 2), torch.zeros(8).long()
        return Data(train=(inputs, targets), val=(inputs, targets))


def test_each_report_has_the_use_and_the_third_the_advice(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(diagnostics, "open_gpu", lambda _: "GPU-0a1b")
    monkeypatch.setattr(diagnostics, "_GPU_SECONDS", 0.0)
    nvml.busy = [22] * 100
    config = TrialConfig.model_validate(
        {
            "task": {"name": f"{__name__}:Small"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 3},
            "train": {"batch_size": 4},
        }
    )
    with open_trainer(config, tmp_path, device="cpu", memory_share=0.2, task=Small()) as trainer:
        reports = list(trainer.events())
    assert [one.metrics["gpu/utilization_percent"] for one in reports] == [22.0] * 3
    assert [one.metrics["gpu/memory_percent"] for one in reports] == [25.0] * 3
    exceeded, *_ = reports[0].signals
    assert exceeded.startswith("it has 25 % of the GPU's memory, and its share is 20 %")
    assert len(reports[0].signals) == 1
    assert reports[2].signals[0] == (
        "GPU utilisation 22 % in the median: raise loader.num_workers or batch_size"
    )
