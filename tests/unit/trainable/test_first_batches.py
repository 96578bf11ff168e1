"""The first batches of a run before it starts: refusals, warnings and costs."""

# ruff: noqa: ARG001  what stands in for a method keeps its signature

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.golden.messages import compare_messages
from tests.unit.trainable.conftest import CPU, Toy, variant
from trainable.build import Parts, build_parts, build_step
from trainable.check import first_batches
from trainable.check.first_batches import FirstBatches, checkpoint_bytes, reported_names
from trainable.check.testing import check_task
from trainable.config import TrainConfig
from trainable.errors import ConfigError, TaskError, TrainingError
from trainable.seeding import HostRngState
from trainable.task import Data, Task
from trainable.watch.diagnostics import LayerNorms

Compute = Callable[..., tuple[FirstBatches, Parts]]


@pytest.fixture
def compute(configure: Callable[..., Any]) -> Compute:
    """Compute the first batches of a variant of the toy task."""

    def made(task: Task, *, resumed: bool = False, **config: Any) -> tuple[FirstBatches, Parts]:
        wanted = configure(**config)
        parts = build_parts(wanted, device=CPU, task=task)
        first = FirstBatches(parts, wanted, build_step(parts, wanted.train), resumed=resumed)
        first.compute()
        return first, parts

    return made


def _returns(result: Any) -> Callable[..., Any]:
    def evaluate(self: Task, model: nn.Module, batches: Any) -> Any:
        for _ in batches:
            pass
        return result

    return evaluate


def _logs(self: Task, model: nn.Module, batch: Any) -> Any:
    self.log("train/aux", 1.0)
    return Toy.loss(self, model, batch)


def _detached(self: Task, model: nn.Module, batch: Any) -> Any:
    total, weight = Toy.loss(self, model, batch)
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
def test_first_batches_refuse(case: str, compute: Compute, request: pytest.FixtureRequest) -> None:
    methods, metric = REFUSED[case]
    more: dict[str, Any] = {"mode": ("min", "max")} if isinstance(metric, tuple) else {}
    with pytest.raises(TrainingError) as refused:
        compute(variant(**methods), metric=metric, **more)
    assert isinstance(refused.value, ConfigError | TaskError)
    compare_messages(request, [str(refused.value)])


def _raises(self: Task, model: nn.Module, batch: Any) -> Any:
    raise ZeroDivisionError("out of cheese")


def _evaluation_raises(self: Task, model: nn.Module, batches: Any) -> Any:
    raise ValueError("only one class")


def _not_a_number(self: Task, model: nn.Module, batch: Any) -> Any:
    total, weight = Toy.loss(self, model, batch)
    return total * float("nan"), weight


def _no_memory(self: Task, model: nn.Module, batch: Any) -> Any:
    raise torch.OutOfMemoryError("out of memory")


WARNED = {
    "a loss that raises": {"loss": _raises},
    "an evaluation that raises": {"evaluate": _evaluation_raises},
    "a loss that is not a number": {"loss": _not_a_number},
    "memory that does not suffice": {"loss": _no_memory},
    "an evaluation that is not a number": {"evaluate": _returns({"loss": float("nan")})},
}


@pytest.mark.parametrize("case", WARNED)
def test_first_batches_warn(case: str, compute: Compute, request: pytest.FixtureRequest) -> None:
    first, _ = compute(variant(**WARNED[case]))
    compare_messages(request, [_without_place(caution) for caution in first.cautions])


def _without_place(caution: str) -> str:
    before, at, rest = caution.partition(" (at ")
    return before + at + rest[rest.index(")") :] if at else caution


def test_metric_that_the_module_names_is_only_warned_of(compute: Compute) -> None:
    """It may depend on the batch: this module has the text `recall_of_one`."""
    assert "recall_of_one"
    first, _ = compute(variant(__name__), metric="val/recall_of_one", mode="max")
    (caution,) = first.cautions
    assert "'val/recall_of_one' is not reported" in caution
    assert "val/accuracy" in caution


@pytest.mark.parametrize("metric", ["train/aux", "val/extra", "train/loss", "val/accuracy"])
def test_logged_and_reported_metrics_are_accepted(compute: Compute, metric: str) -> None:
    def evaluate(self: Task, model: nn.Module, batches: Any) -> Any:
        self.log("extra", 2.0)
        return Toy.evaluate(self, model, batches)

    first, _ = compute(variant(loss=_logs, evaluate=evaluate), metric=metric)
    assert first.cautions == []


@pytest.mark.parametrize("options", [{}, {"measure_device_time": True}, {"layer_norms_every": 2}])
def test_names_are_those_that_a_run_reports(
    configure: Callable[..., Any], opened: Callable[..., Any], tmp_path: Path, options: Any
) -> None:
    config = configure(epochs=1, **options)
    trainer = opened(config, tmp_path, Toy())
    (report,) = trainer.events()
    parts = build_parts(config, device=CPU, task=Toy())
    layers = LayerNorms(parts.model, list(parts.model.parameters()))
    names = reported_names(parts, config.train, layers._layers)
    assert trainer.plans[0].windows % 2 == 0
    assert names | {"val/loss", "val/accuracy", "best/val/loss", "epoch"} == report.metrics.keys()


def test_nothing_is_drawn(configure: Callable[..., Any]) -> None:
    parts = build_parts(configure(), device=CPU, task=Toy())  # has dropout
    first = FirstBatches(parts, configure(), build_step(parts, configure().train))
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


def test_fastest_of_some_whole_steps_is_the_measurement(compute: Compute, clock: Clock) -> None:
    passes: list[bool] = []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            clock.compute_for(0.05)
            return super().step(closure)

    def loss(self: Task, model: nn.Module, batch: Any) -> Any:
        first_of_its_kind = model.training not in passes
        passes.append(model.training)
        clock.compute_for(0.2 if first_of_its_kind else 0.01)
        return Toy.loss(self, model, batch)

    def build_optimizer(self: Task, model: nn.Module, config: TrainConfig) -> Any:
        return Slow(model.parameters(), lr=config.optimizer.lr)

    first, parts = compute(variant(loss=loss, build_optimizer=build_optimizer))
    assert passes == [True] * 3 + [False] * passes.count(False)
    assert first.costs["step_seconds"] == pytest.approx(0.06)
    assert first.costs["evaluation_seconds"] == pytest.approx(0.01 * parts.val.plan.windows)
    assert first.costs["process_bytes"] > 2**20


def test_slow_step_is_taken_once_or_twice_where_that_decides(
    compute: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_batches, "_ENOUGH_SECONDS", 0.0)
    passes = []

    def loss(self: Task, model: nn.Module, batch: Any) -> Any:
        passes.append(model.training)
        return Toy.loss(self, model, batch)

    first, _ = compute(variant(loss=loss))
    assert passes == [True, False]
    assert first.costs["step_seconds"] > 0
    with pytest.raises(TaskError, match=r"self\.center\.points"):
        compute(_beside())


def test_batch_that_blocks_is_given_up(compute: Compute, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(self: Task, model: nn.Module, batch: Any) -> Any:
        time.sleep(600)

    monkeypatch.setattr(first_batches, "SECONDS", 0.1)
    first, _ = compute(variant(loss=loss))
    (caution,) = first.cautions
    assert "the first training batch took longer than 0.1 s" in caution
    assert "step_seconds" not in first.costs


@pytest.mark.parametrize("samples", [12, 43])
def test_only_batch_of_a_validation_is_decisive(compute: Compute, samples: int) -> None:
    """With more batches, a later one may have what the first lacks."""

    def build_data(self: Task) -> Data:
        x, y = Toy.build_data(self).train
        return Data(train=(x, y), val=(x[:samples], torch.full_like(y[:samples], -100)))

    task = variant(build_data=build_data)
    if samples == 12:
        with pytest.raises(TaskError, match="no targets that count"):
            compute(task)
    else:
        assert "no targets that count" in compute(task)[0].cautions[0]


@pytest.mark.parametrize(("trained", "ema"), [(False, {}), (True, {"decay": 0.9})])
def test_checkpoint_size_is_close_to_that_on_disk(
    configure: Callable[..., Any],
    opened: Callable[..., Any],
    tmp_path: Path,
    trained: bool,
    ema: dict[str, float],
) -> None:
    def build_model(self: Task) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 300), nn.BatchNorm1d(300), nn.Linear(300, 3))
        if trained:
            model.append(nn.Linear(3, 300)).append(nn.Linear(300, 4000).requires_grad_(False))
        return model

    config = configure(epochs=1, ema=ema)
    if trained:
        checkpoint = config.checkpoint.model_copy(update={"parameters": "trained"})
        config = config.model_copy(update={"checkpoint": checkpoint})
    trainer = opened(config, tmp_path, variant(build_model=build_model))
    list(trainer.events())
    trainer.close()
    (file,) = tmp_path.rglob("state.pt")
    parts = build_parts(config, device=CPU, task=variant(build_model=build_model))
    optimizer = 8 * sum(p.numel() for p in parts.model.parameters() if p.requires_grad)
    expected = checkpoint_bytes(parts, optimizer, trained_only=trained)
    assert expected == pytest.approx(file.stat().st_size, rel=0.15)


def test_check_task_names_a_metric_that_is_not_reported() -> None:
    check_task(Toy(), metrics=("val/loss", "val/accuracy", "train/loss"))
    with pytest.raises(TaskError, match=r"'val/ccc' is not reported"):
        check_task(Toy(), metrics="val/" + 3 * "c")


# What receives gradients beside the model must be in an optimizer.

LOOSE = nn.Parameter(torch.ones(3))


class Center(nn.Module):
    """The center loss of face recognition: a parameter for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.ones(3, 3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - self.points[targets]).square().sum()


class Criterion:
    """A loss that is no module."""

    def __init__(self) -> None:
        self.inner = {"center": Center()}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner["center"](outputs, targets)  # type: ignore[no-any-return]


class Beside(Toy):
    """Its loss has a further term, `extra`."""

    def build_model(self) -> nn.Module:
        self.make()
        return super().build_model()

    def make(self) -> None:
        self.center = Center()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        outputs = model(x)
        total = nn.functional.cross_entropy(outputs, y, reduction="sum")
        return total + self.extra(outputs, y), len(y)

    def extra(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.center(outputs, targets)  # type: ignore[no-any-return]


def _beside(make: Any = None, extra: Any = None, **methods: Any) -> Task:
    given = {"make": make, "extra": extra, **methods}
    return type("Custom", (Beside,), {k: v for k, v in given.items() if v is not None})()


def _sets(**values: Callable[[], Any]) -> Callable[[Task], None]:
    def make(task: Task) -> None:
        for name, value in values.items():
            setattr(task, name, value())

    return make


def _sgd(task: Any, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.optimizer.lr)


UNTRAINED: dict[str, tuple[Task, tuple[str, ...]]] = {
    "a module": (_beside(), ("self.center.points", "[*self.center.parameters()]")),
    "a nested module": (
        _beside(_sets(top=lambda: nn.ModuleList([Center()])), lambda t, o, y: t.top[0](o, y)),
        ("[*self.top.parameters()]", "self.top.requires_grad_(False)"),
    ),
    "in a list and an object": (
        _beside(_sets(parts=lambda: [0, Criterion()]), lambda t, o, y: t.parts[1](o, y)),
        ("self.parts[1].inner['center'].points", ".parameters()]"),
    ),
    "a leaf": (
        _beside(
            _sets(shift=lambda: torch.zeros(3, requires_grad=True)),
            lambda t, o, _: (o + t.shift).square().sum(),
        ),
        ("self.shift", '{"params": [self.shift]}', "self.shift.requires_grad_(False)"),
    ),
    "a global": (_beside(extra=lambda _, o, __: (o * LOOSE).sum()), ("a tensor of shape (3,)",)),
    "with groups of the task": (
        _beside(param_groups=lambda _, model: [{"params": list(model.parameters())}]),
        ('add `{"params": [*self.center.parameters()]}` to the list that param_groups()',),
    ),
    "with an optimizer of the task": (
        _beside(build_optimizer=_sgd),
        ("add `[*self.center.parameters()]`", "an optimizer in build_optimizer()"),
    ),
}


@pytest.mark.parametrize("name", UNTRAINED)
def test_what_would_never_change_is_refused_with_the_lines_to_write(
    compute: Compute, name: str
) -> None:
    task, words = UNTRAINED[name]
    with pytest.raises(TaskError, match="loss\\(\\) gives gradients to") as refused:
        compute(task)
    for part in (*words, "in no optimizer"):
        assert part in str(refused.value)
    assert compute(task, resumed=True)[0].cautions == [str(refused.value)]


def test_lines_to_write_let_it_train(
    tmp_path: Path, opened: Callable[..., Any], configure: Callable[..., Any]
) -> None:
    class Mended(Beside):
        def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
            return [*super().param_groups(model), {"params": [*self.center.parameters()]}]

    task = Mended()
    list(opened(configure(), tmp_path, task).events())
    assert not torch.equal(task.center.points, torch.ones(3, 3))


def _own_steps(task: Any) -> None:
    task.center = Center()
    optimizer = torch.optim.SGD(task.center.parameters(), lr=0.1)
    task.__class__.make_step = lambda _: optimizer.step()


def _steps_without_optimizer(task: Any, step: int) -> None:
    with torch.no_grad():
        task.center.points -= 0.1 * task.center.points.grad
    task.center.points.grad = None


def _without_gradient(task: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        return task.center(outputs, targets)  # type: ignore[no-any-return]


def _adversarial(task: Any, model: nn.Module, batch: Any) -> Any:
    if not model.training:
        return Task.loss(task, model, batch)
    x, y = batch
    x = x.clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    total = nn.functional.cross_entropy(outputs, y, reduction="sum") + (slope * x).sum()
    return total, len(y)


ACCEPTED: dict[str, dict[str, Any]] = {
    "frozen": {"make": _sets(center=lambda: Center().requires_grad_(False))},
    "a teacher without gradients": {"extra": _without_gradient},
    "never used": {"extra": lambda _, o, __: 0 * o.sum()},
    "an optimizer in a closure": {"make": _own_steps},
    "updated in a hook": {"on_step_end": _steps_without_optimizer},
    "inputs that require gradients": {"loss": _adversarial},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_frozen_or_trained_otherwise_is_accepted(compute: Compute, name: str) -> None:
    assert compute(_beside(**ACCEPTED[name]))[0].cautions == []
