"""What a task builds is compared with what the run started with."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from trainable.build import open_trainer
from trainable.built import summarise, summarise_data
from trainable.config import TrialConfig
from trainable.errors import ConfigError, TaskError
from trainable.seeding import HostRngState
from trainable.task import Data, Task
from trainable.user_code.fingerprint import BUILT, differences


class Samples(Dataset[Any]):
    """Map-style, no tensors: `order` stands for whatever differs between processes."""

    def __init__(self, order: int, size: int = 24) -> None:
        self.order, self.size = order, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = numpy.full(3, (index + self.order) % 24, dtype=numpy.float32)
        return {"x": x + float(torch.rand(())), "y": index % 2, "word": f"w{index}"}


@dataclass
class Differing(Task):
    """Builds what it is told to; a process that differs is another one of these."""

    order: int = 0
    size: int = 24
    shift: float = 0.0
    extra: bool = False

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 2), *([nn.ReLU()] if self.extra else []))
        with torch.no_grad():
            model[0].weight[0, 0] += self.shift
        return model

    def build_data(self) -> Data:
        def collate(items: list[dict[str, Any]]) -> Any:
            x = torch.stack([torch.from_numpy(item["x"]) for item in items])
            return x, torch.tensor([item["y"] for item in items])

        return Data(Samples(self.order, self.size), Samples(0), collate)


def _train(
    directory: Path, task: Task, pause: int | None = None, num_workers: int = 0
) -> list[float]:
    config = TrialConfig.model_validate(
        {
            "task": {"name": f"{__name__}:Differing"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 2},
            "train": {"batch_size": 8, "loader": {"num_workers": num_workers}},
        }
    )
    with open_trainer(config, directory, device="cpu", task=task, until=pause) as trainer:
        return [report.metrics["val/loss"] for report in trainer.events()]


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Differing(order=1), r"train\[0\], train\[3\], train\[6\], and 6 more"),
        (Differing(size=20), "train: its length"),
        (Differing(shift=0.5), "model: initial values of 0.weight"),
        (Differing(extra=True), "model: its modules"),
    ],
    ids=["order", "length", "weights", "structure"],
)
def test_resume_with_a_changed_build_is_refused(
    tmp_path: Path, other: Differing, named: str
) -> None:
    _train(tmp_path, Differing(), pause=1)
    with pytest.raises(ConfigError, match=f"^task: builds something else .*{named}"):
        _train(tmp_path, other)
    assert len(_train(tmp_path, Differing())) == 1  # nothing was lost


def test_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    (tmp_path / BUILT).write_text(json.dumps({"model: its modules": "another"}))
    assert len(_train(tmp_path, Differing(order=1))) == 2
    assert "train[0]" in json.loads((tmp_path / BUILT).read_text())


def test_items_fetched_by_loader_workers_are_compared(tmp_path: Path) -> None:
    _train(tmp_path, Differing(), pause=1, num_workers=2)
    with pytest.raises(ConfigError, match=r"builds something else .*train\[0\]"):
        _train(tmp_path, Differing(order=1), num_workers=2)
    assert len(_train(tmp_path, Differing(), num_workers=2)) == 1


def test_a_summary_leaves_the_generators_as_they_are() -> None:
    task = Differing()
    model, data = task.build_model(), task.build_data()
    before = HostRngState()
    assert summarise(Task(), model, data, arguments={}, apart=False) == summarise(
        Task(), model, data, arguments={}, apart=False
    )
    assert not before.has_changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda: numpy.array(["a", "b"], dtype=object),
        lambda: {"a": [1, (2.5, "x")]},
        lambda: torch.tensor([1, 2]),
        lambda: torch.zeros(0),
        lambda: object(),
        lambda: {"b", "a"},
        lambda: None,
        lambda: torch.eye(2).to_sparse(),
    ],
)
def test_any_item_can_be_summarised(change: Callable[[], object]) -> None:
    class One(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, _: int) -> object:
            return change()

    data, model = Data(One(), (torch.zeros(1),)), nn.Linear(1, 1)
    assert summarise(Task(), model, data, arguments={}, apart=False) == summarise(
        Task(), model, data, arguments={}, apart=False
    )


def test_dataset_is_not_opened_before_loader_workers() -> None:
    fetched = []

    class Opening(Samples):
        def __getitem__(self, index: int) -> Any:
            fetched.append(index)
            return super().__getitem__(index)

    data, model = Data(Opening(0), Opening(0)), nn.Linear(1, 1)
    apart = summarise(Task(), model, data, arguments={}, apart=True)
    assert not fetched
    assert apart == summarise(Task(), model, data, arguments={}, apart=False)
    assert {"train[0]", "val[23]"} < set(apart)
    assert fetched


def test_item_that_kills_the_process_is_reported() -> None:
    class Deadly(Samples):
        def __getitem__(self, _: int) -> Any:
            os._exit(9)

    data = Data(Deadly(0), Deadly(0))
    with pytest.raises(TaskError, match="ended with exit status 9"):
        summarise(Task(), nn.Linear(1, 1), data, arguments={}, apart=True)


def test_a_run_is_not_resumed_with_another_file(tmp_path: Path) -> None:
    base = tmp_path / "base.bin"

    class Pretrained(Differing):
        def build_model(self) -> nn.Module:
            assert self.reads(base) == base
            return super().build_model()

    base.write_bytes(b"whole weights")
    _train(tmp_path / "run", Pretrained(), pause=1)
    base.write_bytes(b"whole w")
    with pytest.raises(ConfigError, match=rf"\(file {base}\)"):
        _train(tmp_path / "run", Pretrained())


@dataclass
class Collating(Differing):
    """Its items stay; what its collate function returns may not."""

    scale: float = 1.0

    def build_data(self) -> Data:
        data = super().build_data()
        plain = data.collate
        assert plain is not None

        def collate(items: list[dict[str, Any]]) -> Any:
            x, y = plain(items)
            return self.scale * x + torch.rand(()), y

        return Data(data.train, data.val, plain, collate)


def test_resume_with_another_collate_function_is_refused(tmp_path: Path) -> None:
    _train(tmp_path, Collating(), pause=1)
    with pytest.raises(ConfigError, match=r"\(val: its collated batch\)"):
        _train(tmp_path, Collating(scale=2.0))


@pytest.mark.parametrize(
    ("other", "differing"),
    [
        (Collating(), []),
        (Collating(order=1), ["train[0]", "train: its collated batch"]),
        (Collating(size=20), ["train: its length"]),
        (Collating(scale=2.0), ["val: its collated batch"]),
    ],
    ids=["same", "items", "length", "collate"],
)
def test_data_summary_names_what_differs(other: Collating, differing: list[str]) -> None:
    before, now = (
        summarise_data(task.build_data(), arguments={}) for task in (Collating(), other)
    )
    found = differences(before, now)
    assert set(differing) <= set(found)
    assert bool(found) == bool(differing)
    assert all("val" in key for key in found) or other.scale == 1.0


def test_a_sweeps_summary_of_its_data_is_small() -> None:
    class Large(Dataset[Any]):
        def __len__(self) -> int:
            return 10**6

        def __getitem__(self, index: int) -> Any:
            return {
                f"k{i}": [torch.full((3,), float(index)) for _ in range(20)] for i in range(20)
            }

    data = Data(Large(), Large(), lambda items: items)
    assert len(json.dumps(summarise_data(data, arguments={}))) < 50_000


def test_raising_collate_function_is_reported_by_the_step() -> None:
    def collate(_: list[Any]) -> Any:
        raise StopIteration

    data = Data(Samples(0), Samples(0), collate)
    found = summarise_data(data, arguments={})
    assert found["train: its collated batch"] == "raises StopIteration"
