"""Messages about data, batches, outputs and losses: the lines that they name are right."""

# ruff: noqa: ARG005  what stands in for something keeps its signature

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from tests.golden.messages import compare_messages
from trainable.build import build_parts
from trainable.check.task_checks import quick_check
from trainable.errors import TaskError
from trainable.forms import result_problem
from trainable.task import Data, Task, check_data

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
NX, NY = X.double().numpy(), Y.numpy()


class Returning(nn.Linear):
    """A layer that returns its output in another form, and takes inputs by name."""

    form: Callable[[Any], Any]

    def __init__(self, form: Callable[[Any], Any], outputs: int = 2) -> None:
        super().__init__(4, outputs)
        self.form = form

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.form(super().forward((*inputs, *named.values())[0]))


class Output(dict):  # type: ignore[type-arg]
    """As the outputs of transformers: a dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Items(Dataset[Any]):
    def __init__(self, form: Callable[[Any, Any], Any]) -> None:
        self.form = form

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return self.form(X[index], Y[index])


def _task(
    samples: Any = (X, Y), form: Callable[[Any], Any] = lambda out: out, outputs: int = 2
) -> type[Task]:
    class Custom(Task):
        def build_model(self) -> nn.Module:
            return Returning(form, outputs)

        def build_data(self) -> Data:
            return Data(train=samples, val=samples)

    return Custom


LOSSES = {
    "a dict": _task(Items(lambda x, y: {"x": x, "y": y})),
    "a dict with labels first": _task(Items(lambda x, y: {"label": y, "image": x})),
    "tokens": _task(
        Items(lambda x, y: {"input_ids": x, "attention_mask": x, "labels": y}),
        lambda out: Output(logits=out),
    ),
    "a dict of one": _task(Items(lambda x, y: {"image": x}), outputs=4),
    "one tensor": _task(Items(lambda x, y: x), outputs=4),
    "one part": _task(Items(lambda x, y: (x,)), outputs=4),
    "three parts": _task(Items(lambda x, y: (x, x, y))),
    "an output that is a dict": _task(form=lambda out: {"loss": None, "logits": out}),
    "an output with attributes": _task(form=lambda out: Output(logits=out)),
    "an output that is a tuple": _task(form=lambda out: (out, None)),
    "a regression": _task((X, X.sum(1)), outputs=1),
    "a regression with a column": _task((X, X.sum(1, keepdim=True)), outputs=1),
    "two classes as numbers": _task((X, Y.float()), outputs=1),
    "two classes and one logit": _task(outputs=1),
    "classes last": _task((X, Y[:, None].repeat(1, 5)), lambda out: out[:, None].repeat(1, 5, 1)),
}


@pytest.mark.parametrize("case", LOSSES)
def test_lines_of_a_refused_batch_define_a_loss(
    case: str, configure: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    kind = LOSSES[case]
    message = _refusal(kind, configure)
    compare_messages(request, [message])
    names: dict[str, Any] = {}
    for line in re.findall("`((?:import|from|def) .+?)`", message):
        exec(line, names)
    mended: Any = type("Mended", (kind,), {"loss": names["loss"]})
    assert _cautions(mended, configure) == []


def _cautions(kind: type[Task], configure: Callable[..., Any]) -> list[str]:
    return quick_check(build_parts(configure(), device=torch.device("cpu"), task=kind()))


def _refusal(kind: type[Task], configure: Callable[..., Any]) -> str:
    with pytest.raises(TaskError) as refused:
        _cautions(kind, configure)
    return str(refused.value)


TARGETS = {
    "classes as numbers": (X, Y.float()),
    "one-hot": (X, F.one_hot(Y, 2)),
    "a column of classes": (X, Y[:, None]),
    "classes from 1": (X, Y + 1),
    "inputs in double precision": (X.double(), Y),
    "inputs of bytes": (X.abs().mul(9).byte(), Y),
}


@pytest.mark.parametrize("case", TARGETS)
def test_lines_of_refused_samples_mend_them(
    case: str, configure: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    message = _refusal(_task(TARGETS[case]), configure)
    compare_messages(request, [message])
    names = dict(zip("xy", TARGETS[case], strict=True))
    exec(message.rpartition("`")[0].rpartition("`")[2], names)
    assert _cautions(_task((names["x"], names["y"])), configure) == []


class Table(dict):  # type: ignore[type-arg]
    iloc = None


SPLITS: dict[str, Any] = {
    "a text": "data/train",
    "a dict of tensors": {"x": X, "y": Y},
    "a dict of arrays": {"x": NX, "y": NY},
    "a dict of splits": {"train": TensorDataset(X, Y), "test": TensorDataset(X, Y)},
    "arrays": (NX, NY),
    "an array and a tensor": (X, NY),
    "a list": [X, Y],
    "a list of arrays": [NX, NY],
}


@pytest.mark.parametrize("case", SPLITS)
def test_lines_of_a_refused_split_make_data(case: str, request: pytest.FixtureRequest) -> None:
    given = SPLITS[case]
    task = _task(given)()
    with pytest.raises(TaskError) as refused:
        check_data(task.build_data(), task)
    message = str(refused.value)
    compare_messages(request, [message])
    line = message.rpartition("`")[0].rpartition("`")[2]
    parts = given if isinstance(given, list | tuple) else (X, Y)
    names = dict(zip("xy", parts, strict=False))
    names |= {"train": given, "data": given, "torch": torch, "Data": Data}
    whole = (torch.ones(2), torch.ones(2))
    data = check_data(eval(line.replace("...", "whole"), names | {"whole": whole}), task)
    assert isinstance(data.train, tuple | TensorDataset)


@pytest.mark.parametrize(
    "samples",
    [
        {0: (X[0], Y[0]), 1: (X[1], Y[1])},
        [X[:3], X[:3], X[:3], X[:3]],
        [(X[0], Y[0])] * 3,
        [X[:3], X[:2]],
        TensorDataset(X),
    ],
)
def test_lists_of_samples_are_no_slip(samples: Any) -> None:
    task = _task(samples)()
    check_data(task.build_data(), task)


def test_a_table_is_refused() -> None:
    task = _task(pandas.DataFrame({"a": [1.0, 2.0], "target": [0, 1]}))()
    with pytest.raises(TaskError, match="DataFrame of pandas, whose items are columns"):
        check_data(task.build_data(), task)


RESULTS = {
    "one value": X.sum(),
    "a dict": {"loss": X.sum()},
    "three values": (X.sum(), 1, 2),
    "no scalar": (X, 1),
    "no tensor": (0.5, 1),
    "logits as the weight": (X.sum(), X),
    "a text as the weight": (X.sum(), "3"),
    "no weight": (X.sum(), None),
    "a negative weight": (X.sum(), -1),
}


@pytest.mark.parametrize("case", RESULTS)
def test_results_of_another_form_are_refused(case: str, request: pytest.FixtureRequest) -> None:
    message = result_problem(RESULTS[case])
    assert message is not None
    compare_messages(request, [message])


@pytest.mark.parametrize("weight", [3, 3.0, torch.tensor(3), numpy.int64(3), numpy.ones(())])
def test_every_kind_of_number_is_a_weight(weight: Any) -> None:
    assert result_problem((X.sum(), weight)) is None
