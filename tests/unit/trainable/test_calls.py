"""What cannot be called as a run calls it is refused before a run, with the form to write."""

# ruff: noqa: ARG001, ARG005  what has another signature than the rest uses nothing of it

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from tests.unit.trainable.conftest import Waves
from trainable.build import build_parts, check_loop
from trainable.calls import HOOKS, TASK_CALLS
from trainable.config import TaskConfig, TrialConfig
from trainable.errors import ConfigError, TaskError
from trainable.task import Data, Task


def _data(**options: Any) -> Callable[[Any], Data]:
    def build_data(self: Task) -> Data:
        samples = torch.utils.data.TensorDataset(*Waves().build_data().train)  # type: ignore[misc]
        return Data(train=samples, val=samples, **options)

    return build_data


REFUSED: dict[str, tuple[str, Any, str]] = {
    "too few": ("loss", lambda self, model: None, r"`def loss\(self, model, batch\):`"),
    "too many": ("loss", lambda self, model, batch, epoch: None, "missing .*'epoch'"),
    "exchanged": ("loss", lambda self, batch, model: None, "batch would be the model"),
    "without self": ("build_model", lambda: None, r"`def build_model\(self\):`"),
    "short names": ("build_optimizer", lambda self, cfg, model: None, "cfg would be the model"),
    "start": ("on_epoch_start", lambda self: None, r"on_epoch_start\(self, epoch\).*self\.net"),
    "state": ("load_state_dict", lambda self: None, r"load_state_dict\(self, state\):`"),
    "no function": ("evaluate", {"loss": 0.5}, "is not a callable object"),
    "collate": ("build_data", _data(collate=lambda x, y: x), r"collate\(samples\)"),
    "test": ("build_data", _data(test=lambda path: path), r"test\(\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_method_that_a_run_cannot_call_is_refused(
    case: str, configure: Callable[..., TrialConfig]
) -> None:
    name, method, said = REFUSED[case]
    kind: Any = type("Custom", (Waves,), {name: method})
    with pytest.raises(TaskError, match=said) as refused:
        build_parts(configure(), device=torch.device("cpu"), task=kind())
    assert str(refused.value).startswith("Custom.")


ACCEPTED: list[tuple[str, Any]] = [
    ("loss", lambda self, net, samples: Waves.loss(self, net, samples)),
    ("loss", lambda self, *arguments: Waves.loss(self, *arguments)),
    ("loss", lambda self, model, batch, scale=1.0: Waves.loss(self, model, batch)),
    ("evaluate", functools.partialmethod(Waves.evaluate)),
    ("build_model", staticmethod(lambda: nn.Linear(4, 2))),
    ("build_data", _data(collate=default_collate, test=list)),
]


@pytest.mark.parametrize("number", range(len(ACCEPTED)))
def test_method_of_another_form_that_can_be_called_is_accepted(
    number: int, configure: Callable[..., TrialConfig]
) -> None:
    kind: Any = type("Custom", (Waves,), dict([ACCEPTED[number]]))
    build_parts(configure(), device=torch.device("cpu"), task=kind())


def test_each_call_is_that_of_the_base_class() -> None:
    assert set(HOOKS) <= set(TASK_CALLS)
    for name, given in TASK_CALLS.items():
        assert tuple(inspect.signature(getattr(Task(), name)).parameters) == given


def _exchanged(context: Any, config: Any) -> Any:
    yield {"val/loss": 1.0}


def _short(ctx: Any, cfg: Any) -> Any:
    yield {"val/loss": 1.0}


def _of_a_task(model: Any, batches: Any) -> Any:
    yield {"val/loss": 1.0}


def _cfg(cfg: Any, run: Any) -> Any:
    yield {"val/loss": 1.0}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_exchanged, "takes context, config, and context would be the config; "),
        (_short, "takes ctx, cfg, and ctx would be the config; "),
        (_of_a_task, "takes model, batches, and model would be the config; "),
        (_cfg, None),
    ],
)
def test_loop_that_takes_its_arguments_for_others_is_refused(
    function: Any, said: str | None, configure: Callable[..., TrialConfig]
) -> None:
    task = TaskConfig(name=f"{__name__}:{function.__name__}")
    config = configure().model_copy(update={"task": task})
    if said is None:
        check_loop(config, function)
        return
    with pytest.raises(ConfigError) as refused:
        check_loop(config, function)
    assert said in refused.value.message
    assert f"write `def {function.__name__}(config, context):`" in refused.value.message
