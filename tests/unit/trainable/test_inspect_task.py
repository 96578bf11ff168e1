"""One rehearsal answers what a sweep asks about its task, by as few builds as that takes.

A check calls a task's methods in the order of a run: each may need what others made before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.time_limits import scaled
from tests.unit.trainable.conftest import Toy
from trainable.call_in_fork import ForkEnded, in_fork
from trainable.check.examine import BuildRaised, examine, examine_or_refuse
from trainable.check.findings import CheckRequest, Findings
from trainable.check.inspect_task import inspect_task
from trainable.check.testing import check_task
from trainable.config import TrainConfig, TrialConfig
from trainable.export import load_model
from trainable.task import Batch, Data, Task

pytestmark = pytest.mark.usefixtures("patient")

ROOT = Path(__file__).parents[3]
_BUILDS = "TEST_BUILDS"
_MEASURED = {"step_seconds", "evaluation_seconds", "build_seconds", "process_bytes"}


class Growing(Task):
    """Its data change in training. Notes each build in a file."""

    def __init__(self, *, kind: str = "sound") -> None:
        self.kind, self.steps = kind, 0

    def build_data(self) -> Data:
        x = torch.arange(96.0).view(24, 4).sin()
        self.labels = (x.sum(1) > 0).long()
        return Data(train=(x, self.labels), val=(x.clone(), self.labels.clone()))

    def build_model(self) -> nn.Module:
        with open(os.environ[_BUILDS], "a") as file:
            file.write(".")
        if self.kind == "raises":
            raise ZeroDivisionError("no model")
        if self.kind == "ends":
            os._exit(7)
        return nn.Linear(4, 2)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        if self.kind == "mean":
            return F.cross_entropy(model(inputs), targets), 1
        if self.kind == "diverges" and model.training and self.steps:
            return model(inputs).sum() * torch.inf, len(targets)
        return super().loss(model, batch)

    def on_step_end(self, step: int) -> None:
        self.labels[:step], self.steps = 1, step


def _with_task(config: TrialConfig, name: str, **arguments: Any) -> TrialConfig:
    task = {"name": f"{__name__}:{name}", **arguments}
    return TrialConfig.model_validate({**config.model_dump(), "task": task})


@pytest.fixture
def request_of(
    configure: Callable[..., TrialConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], CheckRequest]:
    monkeypatch.setenv(_BUILDS, str(tmp_path / "builds"))

    def made(kind: str) -> CheckRequest:
        request = CheckRequest(config=_with_task(configure(), "Growing", kind=kind))
        return CheckRequest.model_validate_json(request.model_dump_json())

    return made


def _num_builds() -> int:
    return len(Path(os.environ[_BUILDS]).read_text())


def test_sound_task_is_built_once_and_resumed_once(
    request_of: Callable[[str], CheckRequest],
) -> None:
    request = request_of("sound")
    found = inspect_task(request)
    assert _num_builds() == 2
    assert found.checked == []
    alone = in_fork(examine_or_refuse, request)
    assert isinstance(alone, Findings)
    first, second = (
        {key: value for key, value in asdict(one).items() if key not in _MEASURED}
        for one in (found, alone)
    )
    assert first == second  # the data as they were built
    assert all(getattr(found, key) for key in _MEASURED)


@pytest.mark.parametrize(("kind", "said"), [("mean", "seems to return a mean"), ("diverges", "")])
def test_task_with_a_caution_is_built_once_more(
    kind: str, said: str, request_of: Callable[[str], CheckRequest]
) -> None:
    found = inspect_task(request_of(kind))
    assert _num_builds() == 2 + (kind == "mean")  # a run that diverges is not resumed
    assert [said in caution for caution in found.checked] == [True] * bool(said)
    assert found.step_seconds


def test_task_that_cannot_be_built_is_told_from_one_that_ends_its_process(
    request_of: Callable[[str], CheckRequest],
) -> None:
    with pytest.raises(BuildRaised, match="ZeroDivisionError: no model"):
        inspect_task(request_of("raises"))
    with pytest.raises(ForkEnded) as ended:
        inspect_task(request_of("ends"))
    assert ended.value.code == 7


def test_check_ends_with_several_threads(tmp_path: Path) -> None:
    """What compares large states computes in threads, and its forks have none of them."""
    config = TrialConfig.model_validate(
        {
            "task": {"name": "digits", "model": "mlp", "width": 512},
            "metric": "val/loss",
            "mode": "min",
            "seed": 0,
            "budget": {"epochs": 2},
        }
    )
    done = subprocess.run(
        [sys.executable, "-m", "trainable.check.inspect_task"],
        input=f"{CheckRequest(config=config).model_dump_json()}\n",
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "3", "PYTHONPATH": str(ROOT)},
    )
    found = json.loads(done.stdout.splitlines()[0])
    assert found.get("num_train", 0) > 1000, found


_calls: list[list[str]] = []
"""The methods of each task, in the order of their first calls; no state of a task."""
_ORDER = [
    *("constructor", "build_data", "build_model", "param_groups", "build_optimizer"),
    *("on_epoch_start", "loss", "on_step_end", "on_epoch_end", "evaluate"),
]


class Ordered(Toy):
    """Each method uses what another one has made before it."""

    def __init__(self) -> None:
        super().__init__()
        _calls.append(["constructor"])

    def _came(self, name: str, after: str) -> None:
        assert after in _calls[-1], f"{name} before {after}"
        if name not in _calls[-1]:
            _calls[-1].append(name)

    def build_data(self) -> Data:
        self._came("build_data", "constructor")
        return super().build_data()

    def build_model(self) -> nn.Module:
        self._came("build_model", "build_data")
        return super().build_model()

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        self._came("param_groups", "build_model")
        return super().param_groups(model)

    def build_optimizer(self, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        self._came("build_optimizer", "param_groups")
        self.optimizer = torch.optim.SGD(model.parameters(), config.optimizer.lr, momentum=0.9)
        assert self.total_steps is not None
        return self.optimizer

    def on_epoch_start(self, epoch: int) -> None:
        self._came("on_epoch_start", "build_optimizer")
        self.factor = 1.0 + 0 * epoch

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        self._came("loss", "build_optimizer")
        total, weight = super().loss(model, batch)
        factor = self.factor if model.training else 1.0
        return total * factor * len(self.optimizer.param_groups), weight

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


def test_checks_have_the_order_of_a_run(
    tmp_path: Path, opened: Callable[..., Any], configure: Callable[..., TrialConfig]
) -> None:
    _calls.clear()
    trainer = opened(configure(), tmp_path, Ordered())
    list(trainer.events())
    config = _with_task(configure(metric="val/ended"), "Ordered")
    for thorough in (False, True):
        assert examine(CheckRequest(config=config, thorough=thorough)).checked == []
    check_task(Ordered(), metrics=["val/ended", "momentum"])
    assert _calls == [_ORDER] * 5
    newest = trainer.store.generations()[-1]
    assert load_model(config, newest.path).inputs[0].shape[1] == 5, "its loss needs an optimizer"
