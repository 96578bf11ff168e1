"""What receives gradients beside the model and is in no optimizer is refused before a sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.trainable.conftest import Waves
from trainable.build import build_parts, build_step
from trainable.check.first_batches import FirstBatches
from trainable.config import TrainConfig, TrialConfig
from trainable.errors import TaskError
from trainable.task import Task

LOOSE = nn.Parameter(torch.ones(2))


class Center(nn.Module):
    """The center loss of face recognition: a parameter for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.ones(2, 2))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - self.points[targets]).square().sum()


class Criterion:
    """A loss that is no module."""

    def __init__(self, module: nn.Module) -> None:
        self.inner = {"center": module}

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.inner["center"](outputs, targets)  # type: ignore[no-any-return]


class Base(Waves):
    """Two classes; `extra` is a further term of the loss."""

    def build_model(self) -> nn.Module:
        self.make()
        return super().build_model()

    def make(self) -> None:
        self.center = Center()

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        outputs = model(x)
        total = F.cross_entropy(outputs, y, reduction="sum")
        return total + self.extra(outputs, y), len(y)

    def extra(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.center(outputs, targets)


def _made(make: Any = None, extra: Any = None, **methods: Any) -> Task:
    given = {"make": make, "extra": extra, **methods}
    return type("Custom", (Base,), {k: v for k, v in given.items() if v is not None})()


def _sets(**values: Callable[[], Any]) -> Callable[[Task], None]:
    def make(task: Task) -> None:
        for name, value in values.items():
            setattr(task, name, value())

    return make


REFUSED: dict[str, tuple[Task, tuple[str, ...]]] = {
    "a module": (_made(), ("self.center.points", "[*self.center.parameters()]")),
    "a list": (
        _made(_sets(parts=lambda: [0, Center()]), lambda t, o, y: t.parts[1](o, y)),
        ("self.parts[1].points", "[*self.parts[1].parameters()]"),
    ),
    "a dict": (
        _made(_sets(parts=lambda: {"a": Center()}), lambda t, o, y: t.parts["a"](o, y)),
        ("self.parts['a'].points", "[*self.parts['a'].parameters()]"),
    ),
    "a nested module": (
        _made(_sets(top=lambda: nn.ModuleList([Center()])), lambda t, o, y: t.top[0](o, y)),
        ("[*self.top.parameters()]", "self.top.requires_grad_(False)"),
    ),
    "an object": (
        _made(_sets(criterion=lambda: Criterion(Center())), lambda t, o, y: t.criterion(o, y)),
        ("self.criterion.inner['center'].points", ".parameters()]"),
    ),
    "a bare parameter": (
        _made(
            _sets(scale=lambda: nn.Parameter(torch.ones(()))), lambda t, o, _: t.scale * o.sum()
        ),
        ("self.scale", '{"params": [self.scale]}', "self.scale.requires_grad_(False)"),
    ),
    "a leaf": (
        _made(
            _sets(shift=lambda: torch.zeros(2, requires_grad=True)),
            lambda t, o, _: (o + t.shift).square().sum(),
        ),
        ("self.shift", '{"params": [self.shift]}'),
    ),
    "a global": (_made(extra=lambda _, o, __: (o * LOOSE).sum()), ("a tensor of shape (2,)",)),
    "with groups of the task": (
        _made(param_groups=lambda _, model: [{"params": list(model.parameters())}]),
        ('add `{"params": [*self.center.parameters()]}` to the list that param_groups()',),
    ),
}


def _compute(configure: Callable[..., TrialConfig], task: Task, **options: Any) -> FirstBatches:
    config = configure()
    parts = build_parts(config, device=torch.device("cpu"), task=task)
    first = FirstBatches(parts, config, build_step(parts, config.train), **options)
    first.compute()
    return first


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_never_change_is_refused_with_the_lines_to_write(
    configure: Callable[..., TrialConfig], name: str
) -> None:
    task, words = REFUSED[name]
    with pytest.raises(TaskError, match="loss\\(\\) gives gradients to") as refused:
        _compute(configure, task)
    for part in (*words, "in no optimizer"):
        assert part in str(refused.value)
    (caution,) = _compute(configure, task, resumed=True).cautions
    assert caution == str(refused.value)


def test_lines_to_write_let_it_train(
    tmp_path: Any, opened: Callable[..., Any], configure: Callable[..., TrialConfig]
) -> None:
    class Mended(Base):
        def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
            return [*super().param_groups(model), {"params": [*self.center.parameters()]}]

    assert _compute(configure, Mended()).cautions == []
    task = Mended()
    list(opened(configure(), tmp_path, task).events())
    assert not torch.equal(task.center.points, torch.ones(2, 2))


def _without_gradient(task: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.no_grad():
        return task.center(outputs, targets)  # type: ignore[no-any-return]


def _own_steps(task: Any) -> None:
    task.center = Center()
    task.own = torch.optim.SGD(task.center.parameters(), lr=0.1)


def _steps_without_optimizer(task: Any, step: int) -> None:
    del step
    with torch.no_grad():
        task.center.points -= 0.1 * task.center.points.grad
    task.center.points.grad = None


def _steps_in_the_loss(task: Any, outputs: Tensor, targets: Tensor) -> Tensor:
    points = task.center.points
    if points.grad is not None:
        points.data.sub_(points.grad, alpha=0.1)
        points.grad = None
    return task.center(outputs, targets)  # type: ignore[no-any-return]


def _hidden_steps(task: Any) -> None:
    task.center = Center()
    optimizer = torch.optim.SGD(task.center.parameters(), lr=0.1)
    task.__class__.make_step = lambda _: optimizer.step()


def _adversarial(task: Any, model: nn.Module, batch: Any) -> Any:
    if not model.training:
        return Task.loss(task, model, batch)
    x, y = batch
    x = x.clone().requires_grad_()
    outputs = model(x)
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    total = F.cross_entropy(outputs, y, reduction="sum") + (slope * x).sum()
    return total, len(y)


class OwnOptimizer(Base):
    def build_optimizer(self, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        given = [*model.parameters(), *self.center.parameters()]
        return torch.optim.SGD(given, lr=config.optimizer.lr)


ACCEPTED: dict[str, Callable[[], Task]] = {
    "frozen": lambda: _made(_sets(center=lambda: Center().requires_grad_(False))),
    "a teacher without gradients": lambda: _made(extra=_without_gradient),
    "never used": lambda: _made(extra=lambda _, o, __: 0 * o.sum()),
    "an optimizer on the task": lambda: _made(_own_steps),
    "an optimizer in a closure": lambda: _made(_hidden_steps),
    "updated in a hook": lambda: _made(on_step_end=_steps_without_optimizer),
    "updated in the loss": lambda: _made(extra=_steps_in_the_loss),
    "inputs that require gradients": lambda: _made(loss=_adversarial),
    "in its own optimizer": OwnOptimizer,
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_frozen_or_trained_otherwise_is_accepted(
    configure: Callable[..., TrialConfig], name: str
) -> None:
    assert _compute(configure, ACCEPTED[name]()).cautions == []


def test_with_an_optimizer_of_the_task_the_line_names_it(
    configure: Callable[..., TrialConfig],
) -> None:
    task = _made(
        build_optimizer=lambda _, model, config: torch.optim.SGD(
            model.parameters(), lr=config.optimizer.lr
        )
    )
    with pytest.raises(TaskError, match="an optimizer in build_optimizer\\(\\)") as refused:
        _compute(configure, task)
    assert "add `[*self.center.parameters()]`" in str(refused.value)


def test_slow_step_is_taken_twice_only_where_it_decides(
    configure: Callable[..., TrialConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainable.check.first_batches._ENOUGH_SECONDS", 0.0)
    with pytest.raises(TaskError, match=r"self\.center\.points"):
        _compute(configure, Base())
    assert _compute(configure, ACCEPTED["frozen"]()).cautions == []
