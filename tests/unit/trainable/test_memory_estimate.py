"""The estimate of the optimizer's memory before training."""

from __future__ import annotations

import pytest
import torch

from sweeps.engine.task_check import TaskFacts
from tests.message_parts import assert_parts
from trainable.build import open_trainer
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.config import OptimizerConfig, TrialConfig
from trainable.optim import state_bytes


@pytest.mark.seeds("S27")
@pytest.mark.parametrize(
    "optimizer",
    [{"name": "adamw"}, {"name": "sgd", "momentum": 0.0}, {"name": "sgd"}, {"name": "adafactor"}],
    ids=str,
)
def test_estimated_bytes_equal_used_bytes(tmp_path, optimizer):
    config = TrialConfig.model_validate(
        {
            "task": {"name": "spiral", "samples": 8},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 1},
            "train": {"optimizer": optimizer},
        }
    )
    told = inspect_task(CheckRequest(config=config)).optimizer_bytes
    with open_trainer(config, tmp_path, device="cpu") as trainer:
        list(trainer.events())
        saved = trainer.state.state_dict()["optimizer"]["state"].values()
    tensors = [v for entry in saved for v in entry.values() if torch.is_tensor(v)]
    assert told == sum(t.numel() * t.element_size() for t in tensors if t.ndim)


@pytest.mark.seeds("S27")
def test_estimate_is_on_the_first_line():
    facts = TaskFacts(num_parameters=2**20, weight_bytes=4 * 2**20, optimizer_bytes=8 * 2**20)
    assert_parts(facts.lines()[0], "1,048,576 parameters", "16 MiB", "gradients", "optimizer")


@pytest.mark.seeds("S27")
@pytest.mark.parametrize(
    ("name", "shape", "values"),
    [
        ("adafactor", (100, 30), 100 + 30),
        ("adafactor", (8, 3, 5, 5), 8 * 3 * (5 + 5)),
        ("adafactor", (100,), 100),
        ("adamw", (100, 30), 2 * 100 * 30),
    ],
)
def test_adafactor_keeps_one_row_and_column_per_matrix(name, shape, values):
    config = OptimizerConfig(name=name)
    assert state_bytes(config, [torch.zeros(shape)]) == 4 * values
    assert state_bytes(config, [torch.zeros(shape, dtype=torch.float64)] * 2) == 16 * values
