"""Optimizers that wrap another one: what a run cannot use is refused with the lines to write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_optimizer import Lookahead
from torch import nn

from tests.unit.trainable.conftest import Waves
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.config import OptimizerConfig, TrainConfig, TrialConfig
from trainable.errors import ConfigError, TaskError
from trainable.optim import build_optimizer


def _sgd(params: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr, momentum=0.9)


class Forwarding(torch.optim.Optimizer):
    """Takes the groups and the state of its base, and never calls `super().__init__()`."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.base = _sgd(params, lr)
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.defaults = self.base.defaults

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)


class OnlyBase(Forwarding):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.base = _sgd(params, lr)


class WithProperty(OnlyBase):
    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.base.param_groups


class WithHooks(Forwarding):
    """As some wrappers silence the errors of torch."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        super().__init__(params, lr)


class Mended(Forwarding):
    """What the message says."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        base = _sgd(params, lr)
        torch.optim.Optimizer.__init__(self, base.param_groups, base.defaults)
        self.param_groups, self.state = base.param_groups, base.state
        self.base = base

    def load_state_dict(self, state_dict: Any) -> None:
        self.base.load_state_dict(state_dict)
        self.param_groups, self.state = self.base.param_groups, self.base.state


class WithoutOption(Mended):
    def zero_grad(self) -> None:  # type: ignore[override]
        self.base.zero_grad()


class Needing(Mended):
    def step(self, loss: Any) -> Any:  # type: ignore[override]
        return self.base.step(loss)


class Closing(Mended):
    def step(self, closure: Any) -> Any:
        return self.base.step(closure)


class CallingNone(Mended):
    def step(self, closure: Any = None) -> Any:
        closure()
        return self.base.step()


class RateLess(Mended):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = None


class Stateless(Mended):
    def state_dict(self) -> Any:
        raise NotImplementedError


class NoOptimizer:
    """Has all methods, and is none."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.base = _sgd(params, lr)
        self.param_groups = self.base.param_groups


_SUPER = "write `super().__init__(base.param_groups, base.defaults)`"
REFUSED: dict[type, tuple[str, ...]] = {
    Forwarding: ("Forwarding lacks _optimizer_step_pre_hooks", _SUPER),
    OnlyBase: ("OnlyBase lacks param_groups, state, defaults", _SUPER),
    WithProperty: ("lacks state, defaults", "remove the property param_groups", _SUPER),
    WithHooks: ("WithHooks.step() calls no hooks", _SUPER),
    WithoutOption: ("write `def zero_grad(self, set_to_none=True):` in WithoutOption",),
    Needing: ("Needing.step() needs loss", "Your own loop"),
    Closing: ("needs a closure", "Your own loop"),
    CallingNone: ("'NoneType' object is not callable", "Your own loop"),
    RateLess: ("whose lr is None", "lr=config.optimizer.lr"),
    Stateless: ("state_dict() raised NotImplementedError", "let state_dict() return"),
}


class Built(Waves):
    """Builds the optimizer of a class."""

    def __init__(self, kind: str = "Mended") -> None:
        self.kind = kind

    def build_optimizer(self, model: nn.Module, config: TrainConfig) -> Any:
        kind = globals()[self.kind]
        if kind is Lookahead:
            return Lookahead(_sgd(model.parameters(), config.optimizer.lr), k=2)
        return kind(model.parameters(), lr=config.optimizer.lr)


def _config(configure: Callable[..., TrialConfig], kind: type, **options: Any) -> TrialConfig:
    task = {"name": f"{__name__}:Built", "kind": kind.__name__}
    return TrialConfig.model_validate({**configure(**options).model_dump(), "task": task})


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_wrapper_that_a_run_cannot_use_is_refused(
    configure: Callable[..., TrialConfig], kind: type
) -> None:
    with pytest.raises(TaskError, match=r"^build_optimizer\(\): ") as refused:
        inspect_task(CheckRequest(config=_config(configure, kind)))
    for part in REFUSED[kind]:
        assert part in str(refused.value)


_STATICALLY = [kind for kind in REFUSED if kind not in (CallingNone, Stateless)]


@pytest.mark.parametrize("kind", _STATICALLY, ids=lambda kind: kind.__name__)
def test_wrapper_is_refused_without_a_step(
    tmp_path: Path,
    opened: Callable[..., Any],
    configure: Callable[..., TrialConfig],
    kind: type,
) -> None:
    """By a run that nothing checked, and where the spec names the class."""
    with pytest.raises(TaskError, match=r"^build_optimizer\(\): "):
        opened(configure(), tmp_path, Built(kind.__name__))
    options = OptimizerConfig.model_validate({"name": f"{__name__}:{kind.__name__}", "lr": 0.1})
    with pytest.raises(ConfigError) as refused:
        build_optimizer(options, [{"params": list(nn.Linear(2, 2).parameters())}])
    assert refused.value.key == "train.optimizer.name"
    assert REFUSED[kind][0] in refused.value.message


def test_object_that_is_no_optimizer_is_refused(configure: Callable[..., TrialConfig]) -> None:
    with pytest.raises(TaskError, match="an object of type NoOptimizer"):
        inspect_task(CheckRequest(config=_config(configure, NoOptimizer)))


@pytest.mark.parametrize("kind", [Mended, Lookahead], ids=lambda kind: kind.__name__)
def test_wrapper_of_the_right_form_trains_and_resumes_to_the_same_bits(
    configure: Callable[..., TrialConfig], resumes_exactly: Callable[..., Any], kind: type
) -> None:
    """That of pytorch_optimizer has a `state_dict()` of its own form."""
    inspect_task(CheckRequest(config=_config(configure, kind)))
    resumes_exactly(configure(every="1 step"), lambda: Built(kind.__name__), 4)
