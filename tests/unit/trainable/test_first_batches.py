"""The first batches of a run before it starts: refusals, warnings and costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.golden.messages import compare_messages
from trainable.build import Parts, build_parts, build_step
from trainable.check import first_batches
from trainable.check.first_batches import FirstBatches, checkpoint_bytes, reported_names
from trainable.check.testing import check_task
from trainable.errors import ConfigError, TaskError, TrainingError
from trainable.seeding import HostRngState
from trainable.task import Data, Task
from trainable.watch.diagnostics import LayerNorms

CPU = torch.device("cpu")


class Plain(Task):
    """Two classes in 64 samples; validation has several batches."""

    samples = 64

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)

    def build_data(self) -> Data:
        x = torch.randn(self.samples, 4, generator=torch.Generator().manual_seed(0))
        split = x, (x[:, 0] > 0).long()
        return Data(train=split, val=split)


def _made(module: str = "trainable.task", **methods: Any) -> Task:
    """Return a variant of the task, from a module without the names of this one."""
    kind: type[Task] = type("Custom", (Plain,), {"__module__": module, **methods})
    return kind()


@pytest.fixture
def compute(configure: Callable[..., Any]) -> Callable[..., tuple[FirstBatches, Parts]]:
    """Compute the first batches of a variant of the plain task."""

    def made(task: Task, **config: Any) -> tuple[FirstBatches, Parts]:
        wanted = configure(**config)
        parts = build_parts(wanted, device=CPU, task=task)
        first = FirstBatches(parts, wanted, build_step(parts, wanted.train))
        first.compute()
        return first, parts

    return made


def _returns(result: Any) -> Callable[..., Any]:
    def evaluate(self: Task, model: nn.Module, batches: Any) -> Any:
        del self, model
        for _ in batches:
            pass
        return result

    return evaluate


def _logs(self: Task, model: nn.Module, batch: Any) -> Any:
    self.log("train/aux", 1.0)
    return Plain.loss(self, model, batch)


def _detached(self: Task, model: nn.Module, batch: Any) -> Any:
    total, weight = Plain.loss(self, model, batch)
    return total.detach(), weight


REFUSED = {
    "a metric that is not reported": ({}, "val/acc"),
    "a metric without its prefix": ({}, "accuracy"),
    "one of several": ({}, ("val/loss", "val/f1")),
    "a metric beside those that are logged": ({"loss": _logs}, "train/auxx"),
    "an evaluation that returns a number": ({"evaluate": _returns(0.5)}, "val/loss"),
    "a metric that is no number": ({"evaluate": _returns({"loss": "low"})}, "val/loss"),
    "a loss without gradient": ({"loss": _detached}, "val/loss"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_first_batches_refuse(
    case: str, compute: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    methods, metric = REFUSED[case]
    more: dict[str, Any] = {"mode": ("min", "max")} if isinstance(metric, tuple) else {}
    with pytest.raises(TrainingError) as refused:
        compute(_made(**methods), metric=metric, **more)
    assert isinstance(refused.value, ConfigError | TaskError)
    compare_messages(request, [str(refused.value)])


def _raises(self: Task, model: nn.Module, batch: Any) -> Any:
    del self, model, batch
    raise ZeroDivisionError("out of cheese")


def _evaluation_raises(self: Task, model: nn.Module, batches: Any) -> Any:
    del self, model, batches
    raise ValueError("only one class")


def _not_a_number(self: Task, model: nn.Module, batch: Any) -> Any:
    total, weight = Plain.loss(self, model, batch)
    return total * float("nan"), weight


def _no_memory(self: Task, model: nn.Module, batch: Any) -> Any:
    del self, model, batch
    raise torch.OutOfMemoryError("out of memory")


WARNED = {
    "a loss that raises": {"loss": _raises},
    "an evaluation that raises": {"evaluate": _evaluation_raises},
    "a loss that is not a number": {"loss": _not_a_number},
    "memory that does not suffice": {"loss": _no_memory},
    "an evaluation that is not a number": {"evaluate": _returns({"loss": float("nan")})},
}


@pytest.mark.parametrize("case", WARNED)
def test_first_batches_warn(
    case: str, compute: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    first, _ = compute(_made(**WARNED[case]))
    compare_messages(request, [_without_place(caution) for caution in first.cautions])


def _without_place(caution: str) -> str:
    before, at, rest = caution.partition(" (at ")
    return before + at + rest[rest.index(")") :] if at else caution


def test_metric_that_the_module_names_is_only_warned_of(compute: Callable[..., Any]) -> None:
    """It may depend on the batch: this module has the text `recall_of_one`."""
    assert "recall_of_one"
    first, _ = compute(_made(__name__), metric="val/recall_of_one", mode="max")
    (caution,) = first.cautions
    assert "'val/recall_of_one' is not reported" in caution
    assert "val/accuracy" in caution


@pytest.mark.parametrize("metric", ["train/aux", "val/extra", "train/loss", "val/accuracy"])
def test_logged_and_reported_metrics_are_accepted(
    compute: Callable[..., Any], metric: str
) -> None:
    def evaluate(self: Task, model: nn.Module, batches: Any) -> Any:
        self.log("extra", 2.0)
        return Plain.evaluate(self, model, batches)

    first, _ = compute(_made(loss=_logs, evaluate=evaluate), metric=metric)
    assert first.cautions == []


@pytest.mark.parametrize("options", [{}, {"measure_device_time": True}, {"layer_norms_every": 2}])
def test_names_are_those_that_a_run_reports(
    configure: Callable[..., Any], opened: Callable[..., Any], tmp_path: Path, options: Any
) -> None:
    config = configure(epochs=1, **options)
    trainer = opened(config, tmp_path, _made())
    (report,) = trainer.events()
    parts = build_parts(config, device=CPU, task=_made())
    layers = LayerNorms(parts.model, list(parts.model.parameters()))
    names = reported_names(parts, config.train, layers._layers)
    assert trainer.plans[0].windows % 2 == 0
    assert names | {"val/loss", "val/accuracy", "best/val/loss", "epoch"} == report.metrics.keys()


def test_nothing_is_drawn(configure: Callable[..., Any]) -> None:
    def build_model(self: Task) -> nn.Module:
        del self
        return nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 2))

    wanted = configure()
    parts = build_parts(wanted, device=CPU, task=_made(build_model=build_model))
    first = FirstBatches(parts, wanted, build_step(parts, wanted.train))
    before = HostRngState()
    first.compute()
    assert not before.has_changed()
    assert parts.model.training


class Clock:
    """The clocks of the first batches. They go on where a task computes, and at no other place."""

    def __init__(self) -> None:
        self.now = 0.0

    def compute_for(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(first_batches, "time", made)
    return made


def test_fastest_of_some_steps_is_the_measurement(
    compute: Callable[..., Any], clock: Clock
) -> None:
    passes: list[bool] = []

    def loss(self: Task, model: nn.Module, batch: Any) -> Any:
        first_of_its_kind = model.training not in passes
        passes.append(model.training)
        clock.compute_for(0.2 if first_of_its_kind else 0.01)
        return Plain.loss(self, model, batch)

    first, parts = compute(_made(loss=loss))
    assert passes == [True] * 3 + [False] * passes.count(False)
    assert first.costs["step_seconds"] == pytest.approx(0.01)
    assert first.costs["evaluation_seconds"] == pytest.approx(0.01 * parts.val.plan.windows)
    assert first.costs["process_bytes"] > 2**20


def test_whole_steps_count_the_optimizer(compute: Callable[..., Any], clock: Clock) -> None:
    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.compute_for(0.05)
            return super().step(closure)

    class Task(Plain):
        def build_optimizer(self, model: nn.Module, config: Any) -> Any:
            return Slow(model.parameters(), lr=config.optimizer.lr)

        def loss(self, model: nn.Module, batch: Any) -> Any:
            clock.compute_for(0.01)
            return super().loss(model, batch)

    first, _ = compute(Task())
    assert first.costs["step_seconds"] == pytest.approx(0.06)


def test_slow_step_is_taken_once(
    compute: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def loss(self: Task, model: nn.Module, batch: Any) -> Any:
        passes.append(model.training)
        return Plain.loss(self, model, batch)

    monkeypatch.setattr(first_batches, "_ENOUGH_SECONDS", 0.0)
    first, _ = compute(_made(loss=loss))
    assert passes == [True, False]
    assert first.costs["step_seconds"] > 0


def test_batch_that_blocks_is_given_up(
    compute: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(self: Task, model: nn.Module, batch: Any) -> Any:
        del self, model, batch
        time.sleep(600)

    monkeypatch.setattr(first_batches, "SECONDS", 0.1)
    first, _ = compute(_made(loss=loss))
    (caution,) = first.cautions
    assert "the first training batch took longer than 0.1 s" in caution
    assert "step_seconds" not in first.costs


def test_only_batch_of_a_validation_is_decisive(compute: Callable[..., Any]) -> None:
    """With more batches, a later one may have what the first lacks."""

    def build_data(self: Task) -> Data:
        data = Plain.build_data(self)
        x, y = data.val
        val = x[: self.samples], torch.full_like(y[: self.samples], -100)
        return Data(train=data.train, val=val)

    with pytest.raises(TaskError, match="no targets that count"):
        compute(_made(build_data=build_data, samples=12))
    first, _ = compute(_made(build_data=build_data))
    assert "no targets that count" in first.cautions[0]


@pytest.mark.parametrize(("trained", "ema"), [(False, {}), (True, {"decay": 0.9})])
def test_checkpoint_size_is_close_to_that_on_disk(
    configure: Callable[..., Any],
    opened: Callable[..., Any],
    tmp_path: Path,
    trained: bool,
    ema: dict[str, float],
) -> None:
    def build_model(self: Task) -> nn.Module:
        del self
        model = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 2))
        if trained:
            model.append(nn.Linear(2, 300)).append(nn.Linear(300, 4000).requires_grad_(False))
        return model

    config = configure(epochs=1, ema=ema)
    if trained:
        checkpoint = config.checkpoint.model_copy(update={"parameters": "trained"})
        config = config.model_copy(update={"checkpoint": checkpoint})
    trainer = opened(config, tmp_path, _made(build_model=build_model))
    list(trainer.events())
    trainer.close()
    (file,) = tmp_path.rglob("state.pt")
    parts = build_parts(config, device=CPU, task=_made(build_model=build_model))
    optimizer = 8 * sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    expected = checkpoint_bytes(parts, optimizer, trained_only=trained)
    assert expected == pytest.approx(file.stat().st_size, rel=0.15)


def test_check_task_names_a_metric_that_is_not_reported() -> None:
    check_task(Plain(), metrics=("val/loss", "val/accuracy", "train/loss"))
    with pytest.raises(TaskError, match=r"'val/ccc' is not reported"):
        check_task(Plain(), metrics="val/" + 3 * "c")
