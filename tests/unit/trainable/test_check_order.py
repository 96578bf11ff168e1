"""A check calls a task's methods in the order of a run: each may need what others made before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainable.check.examine import examine
from trainable.check.findings import CheckRequest
from trainable.check.testing import check_task
from trainable.config import TrainConfig, TrialConfig
from trainable.export import load_model
from trainable.task import Batch, Data, Task

_calls: list[list[str]] = []
"""The methods of each task, in the order of their first calls; no state of a task."""


class Ordered(Task):
    """Each method uses what another one has made before it."""

    def __init__(self) -> None:
        _calls.append(["constructor"])

    def _came(self, name: str, after: str) -> None:
        assert after in _calls[-1], f"{name} before {after}"
        if name not in _calls[-1]:
            _calls[-1].append(name)

    def build_data(self) -> Data:
        self._came("build_data", "constructor")
        x = torch.arange(96.0).view(24, 4).sin()
        return Data(train=(x, (x.sum(1) > 0).long()), val=(x, (x.sum(1) > 0).long()))

    def build_model(self) -> nn.Module:
        self._came("build_model", "build_data")
        return nn.Linear(4, 2)

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        self._came("param_groups", "build_model")
        return super().param_groups(model)

    def build_optimizer(self, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        self._came("build_optimizer", "param_groups")
        self.optimizer = torch.optim.SGD(model.parameters(), config.optimizer.lr, momentum=0.9)
        assert self.total_steps is not None
        self.cycle = torch.optim.lr_scheduler.OneCycleLR(
            torch.optim.SGD(model.parameters(), lr=1.0), 1.0, total_steps=self.total_steps + 1
        )
        return self.optimizer

    def on_epoch_start(self, epoch: int) -> None:
        self._came("on_epoch_start", "build_optimizer")
        self.factor = 1.0 + 0 * epoch

    def loss(self, model: nn.Module, batch: Batch) -> Any:
        self._came("loss", "build_optimizer")
        total, weight = super().loss(model, batch)
        return total * self.factor if model.training else total, weight

    def on_step_end(self, step: int) -> None:
        self._came("on_step_end", "loss")
        self.momentum = sum(len(one) for one in self.optimizer.state.values())
        self.log("momentum", self.momentum + 0 * step)

    def on_epoch_end(self, epoch: int) -> None:
        self._came("on_epoch_end", "on_step_end")
        self.ended = epoch

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> Any:
        self._came("evaluate", "on_epoch_end")
        return {**super().evaluate(model, batches), "ended": float(self.ended)}


ORDER = [
    *("constructor", "build_data", "build_model", "param_groups", "build_optimizer"),
    *("on_epoch_start", "loss", "on_step_end", "on_epoch_end", "evaluate"),
]


def _config(configure: Callable[..., TrialConfig], **options: Any) -> TrialConfig:
    return TrialConfig.model_validate(
        {**configure(**options).model_dump(), "task": {"name": f"{__name__}:Ordered"}}
    )


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    _calls.clear()


def test_run_has_that_order(
    tmp_path: Path, opened: Callable[..., Any], configure: Callable[..., TrialConfig]
) -> None:
    list(opened(configure(), tmp_path, Ordered()).events())
    assert _calls == [ORDER]


@pytest.mark.parametrize("thorough", [False, True])
def test_check_of_a_sweep_has_the_order_of_a_run(
    configure: Callable[..., TrialConfig], thorough: bool
) -> None:
    config = _config(configure, metric="val/ended")
    found = examine(CheckRequest(config=config, thorough=thorough))
    assert found.checked == []
    assert found.step_seconds
    assert found.evaluation_seconds
    assert _calls == [ORDER] * (2 if thorough else 1)


def test_check_in_a_test_has_the_order_of_a_run() -> None:
    check_task(Ordered(), metrics=["val/ended", "momentum"])
    assert _calls == [ORDER]


class NeedsOptimizer(Ordered):
    """Its loss reads the optimizer in evaluation too."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        total, weight = super().loss(model, batch)
        return total * len(self.optimizer.param_groups), weight


def test_model_whose_loss_needs_the_optimizer_is_loaded(
    tmp_path: Path, opened: Callable[..., Any], configure: Callable[..., TrialConfig]
) -> None:
    trainer = opened(configure(), tmp_path, NeedsOptimizer())
    list(trainer.events())
    config = TrialConfig.model_validate(
        {**configure().model_dump(), "task": {"name": f"{__name__}:NeedsOptimizer"}}
    )
    newest = trainer.store.generations()[-1]
    assert load_model(config, newest.path).inputs[0].shape[1] == 4
