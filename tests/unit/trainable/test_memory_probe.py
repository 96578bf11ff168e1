"""Steps that measure a trial's memory; `tests/gpu` checks the measurement."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.trainable.conftest import CPU
from trainable.check.memory_probe import measure_step, run_two_steps
from trainable.config import TrialConfig
from trainable.memory import CONTEXT_BYTES, tensor_fraction
from trainable.task import Data, Task

seen: list[tuple[bool, int]] = []
"""Of each batch: whether it was trained on, and its samples."""


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        assert multiprocessing.parent_process() is None, "fetched by a loader process"
        return torch.ones(3), index % 2


class Watched(Task):
    """Notes every batch; its data set has as many samples as asked for."""

    def __init__(self, *, samples: int) -> None:
        self.samples = samples

    def on_epoch_start(self, epoch: int) -> None:
        self.temperature = 1.0 / (epoch + 1)  # without which there is no loss

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def build_data(self) -> Data:
        return Data(train=Samples(self.samples), val=Samples(7))

    def loss(self, model: nn.Module, batch: Any) -> Any:
        seen.append((model.training, len(batch[0])))
        self.log("temperature", self.temperature)
        return super().loss(model, batch)


def _config(**task: Any) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": f"{__name__}:Watched", **task},
            "metric": "val/loss",
            "mode": "min",
            "train": {
                "batch_size": 4,
                "accumulation": 2,
                "compile": True,  # would take seconds, and fail where there is no compiler
                "loader": {"num_workers": 2},
            },
        }
    )


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    seen.clear()


@pytest.mark.parametrize(("samples", "num_epochs"), [(20, 1), (4, 2)])
def test_probe_takes_two_steps_and_an_evaluation_batch(samples: int, num_epochs: int) -> None:
    """The optimizer's state exists in the second step only; an epoch may have one step."""
    run_two_steps(_config(samples=samples), CPU)
    assert seen == ([(True, 2)] * (4 // num_epochs) + [(False, 2)]) * num_epochs


def test_probe_needs_a_cuda_device() -> None:
    assert measure_step(_config(samples=4), CPU) == {
        "failed": "found no CUDA device that torch can use"
    }
    assert seen == []


@pytest.mark.parametrize("share", [0.01, 0.125, 0.5, 1.0])
def test_tensor_cap_leaves_room_for_the_context(share: float) -> None:
    for total in (2**31, 2**36):
        left = share * total - CONTEXT_BYTES
        expected = 1.0 if share == 1.0 else max(share / 2, left / total)
        assert tensor_fraction(share, total) == pytest.approx(expected)
