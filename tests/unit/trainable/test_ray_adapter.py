"""One trial as Ray sees it: the pointer that it is handed, and what a resumed one says first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ray.tune.result import SHOULD_CHECKPOINT
from torch import nn

from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.ray_adapter import TuneTrial
from trainable.task import Data, Task

EPOCHS = 3


class Small(Task):
    """Two classes of three inputs; ten steps of four samples an epoch."""

    def build_model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def build_data(self) -> Data:
        inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
        return Data(train=(inputs, torch.arange(40) % 2), val=(inputs, torch.arange(40) % 2))


@pytest.fixture(autouse=True)
def _threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def _trial(directory: Path) -> TuneTrial:
    config = TrialConfig(
        task={"name": f"{__name__}:Small"},
        metric="val/loss",
        mode="min",
        budget={"epochs": EPOCHS},
        train={"batch_size": 4, "precision": "fp32"},
        checkpoint={"every": "4 steps"},
    )
    return TuneTrial(
        {
            "number": 0,
            "params": {},
            "config": config.model_dump(mode="json"),
            "directory": str(directory),
            "drain": str(directory / "drain"),
            "stop": str(directory / "stop"),
            "threads": 1,
            "halve_batch": False,
        }
    )


def _pointer(trial: TuneTrial, directory: Path) -> list[Any] | None:
    directory.mkdir(exist_ok=True)
    trial.save_checkpoint(str(directory))
    pointer = json.loads((directory / "pointer.json").read_text())
    return pointer and [pointer["path"], pointer["step"], pointer["sha256"]]


def test_ray_is_handed_the_newest_committed_generation(tmp_path: Path) -> None:
    trial, before = _trial(tmp_path), None
    for _ in range(EPOCHS):
        result = trial.step()
        pointer = _pointer(trial, tmp_path / "ray")
        committed = [list(g.pointer) for g in CheckpointStore(tmp_path).generations()]
        assert pointer is None or pointer in committed
        assert result[SHOULD_CHECKPOINT] == (pointer != before)
        before = pointer
    newest = CheckpointStore(tmp_path).newest()
    assert newest is not None
    assert pointer == list(newest.pointer)
    assert newest.step == 10 * EPOCHS
    trial.cleanup()


def test_a_checkpoint_that_was_set_aside_is_told_once_and_logged(tmp_path: Path) -> None:
    first = _trial(tmp_path)
    first.step()
    (tmp_path / "drain").touch()
    assert first.step()["ending"] == "interrupted"
    first.cleanup()
    (tmp_path / "drain").unlink()
    *_, sound, newest = CheckpointStore(tmp_path).generations()
    state = newest.path / "state.pt"
    state.write_bytes(state.read_bytes()[:-1] + b"?")

    second = _trial(tmp_path)
    results = [second.step() for _ in range(EPOCHS - 1)]
    second.cleanup()
    (told,) = results[0]["set_aside"]
    assert told.startswith(f"checkpoint {newest.path.name} is damaged and was set aside: {state} ")
    assert told.endswith(f"its manifest says {newest.sha256}; {sound.path.name} is used instead")
    assert "set_aside" not in results[1]
    assert (tmp_path / "trial.log").read_text().count(told) == 1
