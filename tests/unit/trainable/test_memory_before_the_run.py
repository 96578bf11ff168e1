"""What a user is told about the optimizer's memory before anything is trained."""

from __future__ import annotations

import pytest
import torch

from sweeps.preflight import Facts
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.preflight import examine


@pytest.mark.seeds("S27")
@pytest.mark.parametrize(
    "optimizer", [{"name": "adamw"}, {"name": "sgd"}, {"name": "sgd", "momentum": 0.9}], ids=str
)
def test_bytes_told_before_the_run_are_those_that_it_takes(tmp_path, optimizer):
    config = TrialConfig.model_validate(
        {
            "task": {"name": "spiral", "samples": 8},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 1},
            "train": {"optimizer": optimizer},
        }
    )
    told = examine(config)["optimizer_bytes"]
    with open_trainer(config, tmp_path, device="cpu") as trainer:
        list(trainer.events())
        saved = trainer.state.state_dict()["optimizer"]["state"].values()
    tensors = [v for entry in saved for v in entry.values() if torch.is_tensor(v)]
    assert told == sum(t.numel() * t.element_size() for t in tensors if t.ndim)


@pytest.mark.seeds("S27")
def test_they_stand_in_the_first_line_of_what_is_told():
    line = Facts(num_parameters=1_000_000, optimizer_bytes=8 * 2**20).lines()[0]
    assert "the optimizer keeps 8 MiB" in line
