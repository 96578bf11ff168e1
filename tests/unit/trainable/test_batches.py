"""Batches: every tensor is moved, every type stays, and what cannot be moved is refused."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from trainable.data import move, pin
from trainable.errors import TaskError

META = torch.device("meta")
Pair = collections.namedtuple("Pair", "x y")


class AttrDict(dict):
    __getattr__ = dict.__getitem__


class SelfDict(dict):
    """The idiom by which keys are attributes: its `__dict__` is the dictionary itself."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self.__dict__ = self


class Two(tuple):
    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))


class Rows(list):
    pass


class Encoding(collections.UserDict):
    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.data.items()})


class Bare(collections.UserDict):
    """Without a `to` of its own."""


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    length: int = 3
    derived: Any = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "derived", {"y": self.x + 1})


@dataclasses.dataclass(slots=True)
class Slots:
    x: torch.Tensor
    unset: Any = dataclasses.field(init=False)


class AttrsLike:
    """What `attrs` leaves on a class."""

    __attrs_attrs__ = (types.SimpleNamespace(name="x"),)

    def __init__(self, x):
        self.x = x


class Graph:
    def __init__(self, x):
        self.x = x

    def to(self, device, non_blocking=False):
        assert non_blocking
        return Graph(self.x.to(device))


def _t() -> torch.Tensor:
    return torch.zeros(2)


@pytest.mark.parametrize(
    ("batch", "look"),
    [
        (_t(), lambda b: [b]),
        ([_t(), _t()], lambda b: b),
        ((_t(), "word", 3), lambda b: b[:1]),
        ({"a": {"b": [_t()]}}, lambda b: b["a"]["b"]),
        (AttrDict(a=_t()), lambda b: [b.a, b["a"]]),
        (SelfDict(a=_t()), lambda b: [b.a, b["a"]]),
        (collections.OrderedDict(a=_t()), lambda b: [b["a"]]),
        (collections.defaultdict(list, a=[_t()]), lambda b: b["a"]),
        (types.MappingProxyType({"a": _t()}), lambda b: [b["a"]]),
        (Encoding({"a": _t()}), lambda b: [b["a"]]),
        (Bare({"a": _t()}), lambda b: [b["a"]]),
        (Pair(_t(), [_t()]), lambda b: [b.x, *b.y]),
        (Two(_t(), _t()), lambda b: [*b]),
        (Rows([_t()]), lambda b: [*b]),
        (collections.deque([_t()], maxlen=4), lambda b: [*b]),
        (collections.UserList([_t()]), lambda b: [*b]),
        ({_t()}, lambda b: [*b]),
        (Frozen(_t()), lambda b: [b.x, b.derived["y"]]),
        (Slots(_t()), lambda b: [b.x]),
        (AttrsLike(_t()), lambda b: [b.x]),
        (types.SimpleNamespace(x=_t()), lambda b: [b.x]),
        (Graph(_t()), lambda b: [b.x]),
        (pack_sequence([torch.zeros(3), torch.zeros(2)]), lambda b: [b.data]),
        (torch.max(torch.zeros(2, 2), dim=1), lambda b: [b.values, b.indices]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_tensor_moves_and_the_type_stays(batch, look):
    moved = move(batch, META)

    assert type(moved) is type(batch)
    assert {tensor.device for tensor in look(moved)} == {META}
    assert META not in {tensor.device for tensor in look(batch)}  # the user's own stays


def test_attributes_of_a_container_move_too():
    rows = Rows([_t()])
    rows.mask = _t()

    assert move(rows, META).mask.device == META


def test_object_that_hides_tensors_is_refused():
    class Holder:
        def __init__(self):
            self.inner = {"deep": [_t()]}

    with pytest.raises(TaskError, match=r"type .*Holder, and that holds tensors; .*def to\(self"):
        move({"graph": Holder()}, META)


def test_to_method_that_returns_nothing_is_refused():
    class Forgetful:
        def to(self, device):
            del device

    with pytest.raises(TaskError, match=r"Forgetful.to\(device\) returned None; .*return self"):
        move([Forgetful()], META)


def test_objects_without_tensors_stay_as_they_are():
    class Color(enum.Enum):
        RED = 1

    class Plain:
        pass

    plain, names = Plain(), numpy.array(["a", None], dtype=object)
    moved = move([Color.RED, plain, names, range(3), None, b"x"], META)

    assert moved[0] is Color.RED
    assert moved[1] is plain
    assert moved[2] is names


def test_an_array_of_objects_may_hide_a_tensor():
    with pytest.raises(TaskError, match=r"numpy.ndarray, and that holds tensors"):
        move(numpy.array([_t(), None], dtype=object), META)


def test_a_batch_that_holds_itself_is_moved():
    looped = Rows([_t()])
    looped.append(looped)

    assert move(looped, META)[0].device == META


def test_pinning_keeps_types_and_calls_pin_memory(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor + 1)

    class Own:
        def pin_memory(self):
            return "pinned"

    pinned = pin({"two": Two(_t(), _t()), "own": Own(), "moves": Graph(_t())})

    assert type(pinned["two"]) is Two
    assert pinned["two"][0].tolist() == [1, 1]
    assert pinned["own"] == "pinned"
    assert type(pinned["moves"]) is Graph
