"""Several processes on one GPU: the memory that a trial takes, and its cap.

A CPU has no cap, so all of it needs a CUDA device; see `test_training_gpu.py` for what else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from trainable.build import open_trainer
from trainable.check import memory_probe
from trainable.config import TrialConfig
from trainable.data import TensorSource
from trainable.loop import Trainer
from trainable.memory import CONTEXT_BYTES, tensor_fraction
from trainable.task import Data, Task
from trainable.watch.diagnostics import GpuUse, memory_of_process, open_gpu

ROOT = Path(__file__).parents[2]
DEVICE = torch.device(os.environ.get("GPU_TESTS_DEVICE", "cuda:0"))
MIB = 2**20
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type != "cuda", reason="GPU_TESTS_DEVICE is no CUDA device"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


class Wide(Task):
    """A layer of 64 MiB, on samples of which there may be many; may ask for more than there is."""

    def __init__(self, *, samples: int = 256, excess: bool = False) -> None:
        self.samples, self.excess = samples, excess

    def build_model(self) -> nn.Module:
        return nn.Linear(4096, 4096, bias=False)

    def build_data(self) -> Data:
        inputs, targets = torch.zeros(self.samples, 4096), torch.zeros(self.samples).long()
        return Data(train=(inputs, targets), val=(inputs[:64], targets[:64]))

    def loss(self, model, batch):
        if self.excess:
            torch.empty(2 * _total(), dtype=torch.uint8, device=DEVICE)
        return super().loss(model, batch)


def _total() -> int:
    return torch.cuda.get_device_properties(DEVICE).total_memory


def _config(**task: object) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": f"{__name__}:Wide", **task},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 1},
            "train": {"batch_size": 64, "precision": "fp32"},
        }
    )


@pytest.fixture(autouse=True)
def _no_cap_is_left() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)


def test_step_memory_covers_weights_gradients_and_moments(tmp_path):
    found = memory_probe.measure_step(_config(), DEVICE)
    assert isinstance(found["peak"], int)
    assert isinstance(found["outside"], int)
    assert found["total"] == _total()
    assert 4 * 64 * MIB <= found["peak"] < 8 * 64 * MIB
    assert found["outside"] > 64 * MIB
    # What follows from it is enough for a trial.
    share = (1.2 * found["peak"] + CONTEXT_BYTES) / _total()
    with open_trainer(_config(), tmp_path, device=str(DEVICE), memory_share=share) as trainer:
        assert [report.step for report in trainer.events()] == [4]


def test_insufficient_memory_is_reported_and_freed():
    assert memory_probe.measure_step(_config(excess=True), DEVICE) == {
        "failed": "ran out of memory"
    }
    assert "peak" in memory_probe.measure_step(_config(), DEVICE)


def test_driver_reports_process_memory_or_nothing():
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py: pip install nvidia-ml-py")
    torch.ones(MIB, device=DEVICE)
    gpu = open_gpu(DEVICE)
    if gpu is None or (used := memory_of_process(gpu)) is None:
        pytest.skip("the driver does not tell it here, as in most containers")
    assert torch.cuda.memory_reserved(DEVICE) < used < _total()


def test_use_of_gpu_is_measured_without_waiting_for_it(monkeypatch):
    use = GpuUse(DEVICE)
    if open_gpu(DEVICE) is None:
        pytest.skip("NVML does not know this device, as for a part of a GPU")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("it waits"))
    factors = torch.ones(8192, 8192, device=DEVICE)
    end = time.monotonic() + 4
    while time.monotonic() < end:
        factors = factors @ factors / 8192
        float(factors[0, 0])
        use.sample()
    found = use.read()
    assert 30 < found["gpu/utilization_percent"] <= 100
    if "gpu/memory_percent" in found:  # not in most containers
        assert 100 * factors.nbytes / _total() < found["gpu/memory_percent"] < 100


def test_samples_stay_on_host_when_gpu_share_is_small(tmp_path):
    """A quarter of a GiB of samples is little for a GPU, and much of a share of 768 MiB."""
    small = 2 * CONTEXT_BYTES / _total()  # half of it is for tensors
    assert tensor_fraction(small, _total()) == pytest.approx(small / 2)
    for share, kind in ((1.0, "cuda"), (small, "cpu")):
        directory = tmp_path / kind
        with open_trainer(
            _config(samples=16 * 1024), directory, device=str(DEVICE), memory_share=share
        ) as trainer:
            assert isinstance(trainer, Trainer)
            assert isinstance(trainer._train, TensorSource)
            assert trainer._train._tensors[0].device.type == kind


@pytest.mark.fault(25, "a neighbour takes more than its share of a GPU")
def test_row_25_neighbour_beyond_its_share_is_stopped_alone(tmp_path):
    """There is room on the GPU for what it asks, so that only its cap can stop it."""
    share = (2 * CONTEXT_BYTES + 256 * MIB) / _total()
    undisturbed = _start("modest", tmp_path / "undisturbed", share)
    expected = undisturbed.communicate(timeout=240)[0].split()[-1]
    modest = _start("modest", tmp_path / "modest", share)
    assert modest.stdout is not None
    assert modest.stdout.readline() == "has begun\n"
    greedy = _start("greedy", tmp_path / "greedy", share)
    said = greedy.communicate(timeout=240)[0].splitlines()
    still_training = modest.poll() is None
    digest = modest.communicate(timeout=240)[0].split()[-1]
    assert said == ["the GPU has room for it: True", "stopped by its cap"]
    assert still_training, "it ended before its neighbour asked for anything"
    assert (modest.returncode, greedy.returncode) == (0, 0)
    assert digest == expected


def _start(role: str, directory: Path, share: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.shared_gpu_process", role, str(directory), str(share)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
