"""Trials of two ranks on GPUs: the same bits in each run over NCCL, and the curve of one GPU.

Needs two CUDA devices; one row has both ranks on one of them. What ranks do on CPUs is tested in
`tests/unit/trainable/test_ranks.py`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.loop import Trainer
from trainable.processes.local_ranks import local_ranks

NEEDS_TWO = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="two ranks over NCCL need two CUDA devices"
)
NEEDS_ONE = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
pytestmark = pytest.mark.gpu


def _config(workers: int, *, batch_norm: bool = False, **train: Any) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": "tests.gpu.rank_tasks:Blobs", "batch_norm": batch_norm},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 3},
            "checkpoint": {"every": "1 epoch"},
            "workers": workers,
            "train": {
                "batch_size": 40,
                "accumulation": 2,
                "precision": "fp32",
                "optimizer": {"lr": 0.01},
                **train,
            },
        }
    )


def _train(config: TrialConfig, directory: Path, until: int | None = None) -> tuple[str, float]:
    """Train, and return a digest of the first rank's weights and the last loss."""
    with local_ranks(config, directory) as ranks:
        trainer = open_trainer(config, directory, ranks=ranks, until=until)
        with trainer:
            assert isinstance(trainer, Trainer)
            reports = list(trainer.events())
            digest = hashlib.sha256()
            for value in trainer.model.state_dict().values():
                local = value.to_local() if hasattr(value, "to_local") else value
                digest.update(local.cpu().numpy().tobytes())
    return digest.hexdigest(), reports[-1].metrics["val/loss"]


@NEEDS_TWO
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_a_resumed_run_over_nccl_has_the_same_bits(tmp_path: Path, sharding: str) -> None:
    config = _config(2, sharding=sharding)
    whole = _train(config, tmp_path / "whole")
    assert _train(config, tmp_path / "again") == whole
    _train(config, tmp_path / "resumed", until=1)
    assert _train(config, tmp_path / "resumed") == whole


@NEEDS_TWO
@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_two_gpus_have_the_loss_of_one(tmp_path: Path, sharding: str) -> None:
    _, one = _train(_config(1), tmp_path / "one")
    _, two = _train(_config(2, sharding=sharding), tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-3)


@NEEDS_TWO
def test_sync_batch_norm_is_that_of_one_gpu(tmp_path: Path) -> None:
    _, one = _train(_config(1, batch_norm=True), tmp_path / "one")
    synced = _config(2, batch_norm=True, sync_batch_norm=True, loader={"drop_last": True})
    _, two = _train(synced, tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-3)


@NEEDS_ONE
def test_ranks_on_one_gpu_exchange_through_the_host(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # each rank is shown the first
    _, one = _train(_config(1), tmp_path / "one")
    _, two = _train(_config(2), tmp_path / "two")
    assert two == pytest.approx(one, rel=1e-3)
