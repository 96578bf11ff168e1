"""State outside every `state_dict()`: a run cut in two equals a whole one, or is refused."""

# ruff: noqa: ARG001  what stands in for something keeps its signature

from __future__ import annotations

import io
import itertools
import pickle
import queue
import sqlite3
import tempfile
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.utils.prune
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainable.check.rehearsal import rehearse
from trainable.errors import CheckpointError, TaskError, TrainingCaution
from trainable.export import export_weights
from trainable.object_kinds import tensor_signature
from trainable.object_state import ObjectState, move_modules
from trainable.store.snapshot import parse_state, write_state

pytestmark = pytest.mark.usefixtures("patient")


class Unfreezing(nn.Sequential):
    """Its first layer is frozen until its third batch."""

    def __init__(self):
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        self[0].requires_grad_(False)
        self.seen = 0

    def forward(self, inputs):
        if self.training:
            self.seen += 1
            if self.seen == 3:
                self[0].requires_grad_(True)
        return super().forward(inputs)


class Growing(nn.Module):
    """Registers one buffer in `forward`, lengthens another, and counts in a third."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        self.register_buffer("table", torch.zeros(1))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("spread", torch.ones(1).expand(3))

    def forward(self, inputs):
        if self.training:
            self.table = torch.cat([self.table, inputs.detach().mean().reshape(1)])
            self.hidden = self.hidden * 0.9 + inputs.detach().mean()
            self.later = inputs.detach().mean(0)
            if not hasattr(self, "scale"):
                self.register_buffer("scale", torch.zeros(()))
            self.scale += 0.1
        shift = self.table.sum() + getattr(self, "scale", 0.0) + self.spread
        return self.net(inputs) * shift + self.hidden


class Flipping(nn.Sequential):
    """Goes into evaluation mode with one part, and changes plain attributes."""

    def __init__(self):
        super().__init__(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.calls, self.norms = 0, []

    def forward(self, inputs):
        if self.training:
            self.calls += 1
            self[2].p = max(0.1, self[2].p - 0.05)
            self[1].momentum = 0.3 / self.calls
            self.norms.append(float(inputs.norm()))
            if self.calls > 2:
                self[1].eval()
        return super().forward(inputs) * (1 + 0.01 * sum(self.norms[-2:]))


@pytest.mark.parametrize("model", [Unfreezing, Growing, Flipping])
def test_state_outside_the_state_dict_resumes_exactly(resumes_exactly, configure, toy, model):
    def build(self):
        return model()

    def groups(self, model):
        return [{"params": list(model.parameters())}]

    kind = type("Other", (toy,), {"build_model": build, "param_groups": groups})
    _, resumed = resumes_exactly(configure(), kind, 6)
    assert resumed.resumed_at > 0


@dataclass
class Counter:
    calls: int = 0
    recent: deque = field(default_factory=lambda: deque(maxlen=3))


class Average:
    """An average as many write it by hand: clones in a dict, written through `.data`."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].data.mul_(0.9).add_(p.data, alpha=0.1)
        return self.shadow["0.weight"].abs().mean()


class Averaged(AveragedModel):
    """An average as torch makes it."""

    def update(self, model):
        self.update_parameters(model)
        return self.module[0].weight.detach().abs().mean()


class Critic:
    """A model, an optimizer and a schedule of its own."""

    def __init__(self, _):
        self.net = nn.Linear(8, 1)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 5])

    def update(self, model):
        with torch.enable_grad():
            loss = self.net(model[0].bias.detach()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


@pytest.mark.parametrize("kept", [Average, Averaged, Critic])
def test_state_of_the_task_resumes_exactly(resumes_exactly, configure, toy, kept):
    """Kinds of single values, and places for them: `test_holders.py`."""

    class Holding(toy):
        def build_model(self):
            self.model = super().build_model()  # saved once, by the run
            self.kept = kept(self.model)
            return self.model

        def loss(self, model, batch):
            part, weight = super().loss(model, batch)
            if model.training:
                self.factor = 1 + self.kept.update(model)
                part = part * self.factor
            return part, weight

        def evaluate(self, model, batches):
            return {"loss": super().evaluate(model, batches)["loss"] * float(self.factor)}

    whole, resumed = resumes_exactly(configure(every="2 steps"), Holding, 5)
    assert resumed.resumed_at > 0
    assert whole.state.state_dict()["objects"]


class Iterating:
    def __init__(self):
        super().__init__()
        self.numbers = itertools.cycle([1, 2, 3])

    def loss(self, model, batch):
        next(self.numbers)
        return super().loss(model, batch)


class Yielding(Iterating):
    def __init__(self):
        super().__init__()
        self.numbers = (number for number in range(1000))


class Opening:
    """Opens a file at its first batch, which is read on: a resumed run would read it again."""

    lines = None

    def loss(self, model, batch):
        if self.lines is None:
            self.lines = open(__file__, encoding="utf-8")  # noqa: SIM115
        return super().loss(model, batch)


def _rehearse(configure, make):
    if (problem := rehearse(configure(), make).problem) is not None:
        raise problem


@pytest.mark.parametrize(("how", "named"), [(Yielding, "numbers"), (Opening, "lines")])
def test_unrestorable_state_is_refused(tmp_path, opened, configure, toy, how, named):
    kind = type("Refused", (how, toy), {})
    message = rf"Refused\.{named} \(an object of type .*\) .*; a resumed run .*; .*override"
    with pytest.raises(TaskError, match=message):
        _rehearse(configure, kind)
    task = kind()
    with pytest.raises(TaskError, match=message):
        list(opened(configure(every="1 step"), tmp_path, task).events())
    if how is Opening:
        task.lines.close()


def test_task_may_save_what_it_holds_itself(resumes_exactly, configure, toy):
    class Own(Iterating, toy):
        def __init__(self):
            super().__init__()
            self.drawn = 0

        def loss(self, model, batch):
            self.drawn += model.training
            return super().loss(model, batch)

        def state_dict(self):
            return {"drawn": self.drawn}

        def load_state_dict(self, state):
            self.drawn = state["drawn"]

    whole, resumed = resumes_exactly(configure(), Own, 6)
    assert whole.task.drawn == resumed.task.drawn == 12


class Constants:
    """Nothing of it changes, or is any state."""

    def __init__(self):
        super().__init__()
        self.file = open(__file__, encoding="utf-8")  # noqa: SIM115
        self.words = {f"word{n}": n for n in range(1000)}
        self.function = lambda value: value
        self.criterion = nn.CrossEntropyLoss()
        self.cache = None
        self.untouched = itertools.count()
        self.teacher = nn.Linear(5, 3)

    def loss(self, model, batch):
        if self.cache is None:
            self.cache = Counter(3)  # made once
        return super().loss(model, batch)


def test_constant_values_are_neither_refused_nor_saved(tmp_path, opened, configure, toy):
    task = type("Constant", (Constants, toy), {})()
    trainer = opened(configure(every="1 step"), tmp_path, task)
    list(trainer.events())
    state = trainer.state.state_dict()
    assert state["task"] == {}
    assert b"Counter" in state["objects"]["pickle"]
    assert b"word9" not in state["objects"]["pickle"]
    assert not state["objects"]["tensors"]
    task.file.close()


def test_what_pickle_refuses_is_named_once_and_refused_if_replaced(
    tmp_path, opened, configure, toy
):
    class Connected(toy):
        def __init__(self):
            super().__init__()
            self.at, self.lock = sqlite3.connect(":memory:"), threading.Lock()

        def on_epoch_end(self, epoch):
            if epoch == 1:
                self.at = sqlite3.connect(":memory:")

    with pytest.warns(TrainingCaution, match=r"^Connected\.at \(Connection\): pickle refuses"):
        trainer = opened(configure(), tmp_path, Connected())
    events = trainer.events()
    next(events)
    with pytest.raises(TaskError, match=r"Connected.*at .*cannot be saved .*Connection"):
        list(events)


class Pruned(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 8), nn.Linear(8, 3))

    def forward(self, inputs):
        if not hasattr(self[0], "weight_orig"):
            torch.nn.utils.prune.random_unstructured(self[0], "weight", amount=0.5)
        return super().forward(inputs)


class Strange(nn.Sequential):
    """Gives a state that it does not take."""

    def __init__(self):
        super().__init__(nn.Linear(5, 3))
        self.register_state_dict_post_hook(lambda _, state, *__: state.update(more=torch.ones(1)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Pruned, r"model\.0\.weight_orig .*registered after"),
        (Strange, "cannot be read back.*more"),
    ],
)
def test_unloadable_model_state_is_refused_immediately(
    tmp_path, opened, configure, toy, model, message
):
    kind = type("Other", (toy,), {"build_model": lambda self: model()})  # noqa: ARG005
    with pytest.raises(TaskError, match=r"(?s)" + message):
        _rehearse(configure, kind)
    with pytest.raises(TaskError, match=r"(?s)" + message):
        list(opened(configure(every="1 step"), tmp_path, kind()).events())


def test_modules_on_a_task_go_where_its_model_is(toy):
    task = toy()
    task.holder = {"averages": [AveragedModel(nn.Linear(2, 2))]}
    move_modules(task, None, torch.device("meta"))
    assert task.holder["averages"][0].module.weight.device.type == "meta"


def test_export_names_what_is_evaluated_in_the_models_place(tmp_path, opened, configure, toy):
    class Averaging(toy):
        def build_model(self):
            model = super().build_model()
            self.average, self.teacher = AveragedModel(model), nn.Linear(5, 3)
            return model

        def loss(self, model, batch):
            if model.training:
                self.average.update_parameters(model)
            return super().loss(model, batch)

    trainer = opened(configure(epochs=1), tmp_path, Averaging())
    list(trainer.events())
    generation = trainer.store.best()
    assert export_weights(generation.path, tmp_path / "m.safetensors").held == ["average"]


class _Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_objects_of_others_run_no_code(tmp_path):
    task = Counter()
    objects = ObjectState({"task": task})
    trap = {"pickle": pickle.dumps({"task": _Planted(tmp_path / "here")}), "tensors": []}
    of_class = Counter()
    of_class.recent.append(Counter())
    changed = ObjectState({"task": of_class})
    of_class.recent.append(SimpleNamespace())
    for state in (trap, changed.state_dict()):
        with pytest.raises(CheckpointError, match="has objects of classes"):
            objects.load_state_dict(state, trusted=False)
    assert not list(tmp_path.iterdir())
    plain = ObjectState({"task": of_class})
    of_class.calls = 3
    objects.load_state_dict(plain.state_dict(), trusted=False)
    assert task.calls == 3


class Cell:
    """Known by its number, as a member of a set; any two look alike by their `repr`."""

    def __init__(self, number=0):
        self.number = number

    def __repr__(self):
        return f"<Cell at {id(self):#x}>"

    def __hash__(self):
        return hash(self.number)

    def __eq__(self, other):
        return self.number == other.number


class Slotted:
    __slots__ = ("n",)


class Below(Slotted):
    """Has a slot and a dict."""


class Doubling(list):
    """Gives each item twice."""

    def __iter__(self):
        return (item for item in super().__iter__() for _ in range(2))


class Hooked(nn.Module):
    """Counts its calls in what a hook has closed over."""

    def __init__(self):
        super().__init__()
        calls = {"n": 0}

        def count(*_):
            calls["n"] += 1

        self.register_forward_hook(count)
        self.calls = lambda: calls["n"]

    def forward(self, inputs):
        return inputs


def _with(**attributes):
    holder = Cell()
    vars(holder).update(attributes)
    return holder


def _aliased(holder):
    holder.a = holder.b = torch.ones(2)


def _change_member(holder):
    next(one for one in holder.cells if one.number == 4).name = "here"


def _rehash(holder):
    holder.cell.number = 5
    holder.cells.add(holder.cell)


def _masked(holder):
    holder.array[1] = numpy.ma.masked


RESTORED = {
    "alias": (_with, _aliased, lambda new: new.a is new.b),
    "member of a set": (
        lambda: _with(cells={Cell(n) for n in range(6)}),
        _change_member,
        lambda new: [one.number for one in new.cells if hasattr(one, "name")] == [4],
    ),
    "hash": (
        lambda: _with(cell=Cell(1), cells=set()),
        _rehash,
        lambda new: new.cell in new.cells,
    ),
    "slot": (lambda: _with(one=Below()), lambda o: setattr(o.one, "n", 5), lambda o: o.one.n == 5),
    "list": (
        lambda: _with(items=Doubling([1])),
        lambda o: o.items.append(2),
        lambda o: len(o.items) == 2,
    ),
    "mask": (lambda: _with(array=numpy.ma.ones(3)), _masked, lambda o: o.array.sum() == 2),
    "dtype": (
        lambda: _with(values=torch.ones(2)),
        lambda o: setattr(o.values, "data", o.values.data.half()),
        lambda o: o.values.dtype == torch.half,
    ),
    "hook": (lambda: _with(net=Hooked()), lambda o: o.net(1), lambda o: o.net.calls() == 1),
    "proxy": (
        lambda: _with(other=weakref.proxy(Cell())),
        lambda o: setattr(o, "n", 1),
        lambda o: o.n == 1,
    ),
    "view of a tensor": (
        lambda: _with(bank=torch.zeros(3, 2)),
        lambda o: setattr(o, "row", o.bank[1]) or o.row.add_(1),
        lambda o: o.row.add_(1) is o.row and o.bank[1].tolist() == [2, 2],
    ),
    "views of a new tensor": (
        _with,
        lambda o: vars(o).update(zip("ab", torch.zeros(4).chunk(2), strict=True), whole=None),
        lambda o: o.a.as_strided((4,), (1,), 0)[2:].add_(1).sum() == o.b.sum() == 2,
    ),
    "attribute of a tensor": (
        lambda: _with(weight=nn.Parameter(torch.ones(1))),
        lambda o: setattr(o.weight, "mask", [1]) or setattr(o, "new", torch.ones(1)),
        lambda o: o.weight.mask == [1],
    ),
    "attribute of a new tensor": (
        _with,
        lambda o: setattr(o, "new", torch.ones(1)) or setattr(o.new, "mask", [o]),
        lambda o: o.new.mask == [o],
    ),
    "items of no size": (
        lambda: _with(names=numpy.zeros(3, []), count=0),
        lambda o: setattr(o, "count", 1),
        lambda o: o.count == 1,
    ),
    "arrays that cannot change": (
        _with,
        lambda o: setattr(o, "of", [numpy.broadcast_to(n, 2) for n in (1, 2)]),
        lambda o: [one.tolist() for one in o.of] == [[1, 1], [2, 2]],
    ),
    "array of objects": (
        lambda: _with(pairs=numpy.zeros(1, [("of", object)])),
        lambda o: o.pairs["of"].__setitem__(0, "a"),
        lambda o: o.pairs["of"][0] == "a",
    ),
    "queue": (
        lambda: _with(waiting=queue.Queue()),
        lambda o: o.waiting.put(1),
        lambda o: o.waiting.empty(),
    ),
}


@pytest.mark.parametrize("case", RESTORED)
def test_what_python_code_can_do_is_restored(case):
    build, change, is_right = RESTORED[case]
    before, after = build(), build()
    saved = ObjectState({"task": before})
    change(before)
    state = parse_state(_written(saved.state_dict()))
    ObjectState({"task": after}).load_state_dict(state)
    assert is_right(after)


def _written(state):
    file = io.BytesIO()
    write_state(state, file)
    return file.getvalue()


def _swap(holder):
    holder.one.__class__ = Slotted2


class Slotted2(Cell):
    pass


@pytest.mark.parametrize(
    ("build", "change", "said"),
    [
        (lambda: _with(one=Cell()), _swap, "one .*is of another class"),
        (
            lambda: _with(net=nn.Sequential(nn.ReLU())),
            lambda o: setattr(o.net, "0", nn.GELU()),
            r"net\.0 is a module that was replaced",
        ),
        (
            lambda: _with(net=nn.Linear(1, 1)),
            lambda o: o.net.register_forward_hook(lambda *_: None),
            r"hooks\[0\] is a hook that was registered",
        ),
    ],
)
def test_what_no_new_object_can_be_given_is_refused(build, change, said):
    holder = build()
    objects = ObjectState({"task": holder})
    change(holder)
    with pytest.raises(TaskError, match=said):
        objects.state_dict()


class Unreadable:
    def state_dict(self):
        raise RuntimeError("not yet")

    def load_state_dict(self, state):
        pass


def _never(*_):
    """A function that nobody finds by its name, once it is a method of another class."""


LOST = {
    "view of an array": (
        lambda: _with(bank=numpy.zeros((3, 2))),
        lambda o: setattr(o, "row", o.bank[1]),
        r"row .*is a view of another value.*\.copy\(\)",
    ),
    "two views of a new array": (
        _with,
        lambda o: vars(o).update(zip("ab", numpy.split(numpy.zeros(4), 2), strict=True)),
        r"is a view of another value.*\.copy\(\)",
    ),
    "view of a tensor that has grown": (
        lambda: _with(bank=torch.zeros(3)),
        lambda o: setattr(o.bank, "data", torch.zeros(5)) or setattr(o, "row", o.bank[1]),
        r"row .*is a view of another value.*\.clone\(\)",
    ),
    "tensor that shares no more": (
        lambda: (lambda bank: _with(bank=bank, row=bank[0]))(torch.zeros(3, 2)),
        lambda o: setattr(o.row, "data", torch.zeros(2)),
        "shares memory with others than before",
    ),
    "resized array": (
        lambda: _with(array=numpy.zeros(3)),
        lambda o: o.array.resize(5, refcheck=False),
        "array .*assign a new one instead",
    ),
    "forward": (
        lambda: _with(net=nn.ReLU()),
        lambda o: setattr(o.net, "forward", _never),
        r"net\.forward is a function that was registered",
    ),
    "method": (
        _with,
        lambda o: setattr(o, "draw", _never.__get__(o)),
        r"draw .*no method of its class.*constructor",
    ),
    "lambda": (_with, lambda o: setattr(o, "draw", lambda: 0), r"draw .*cannot be saved"),
    "same error": (lambda: _with(one=Unreadable()), lambda _: None, r"one .*not yet"),
}


@pytest.mark.parametrize("case", LOST)
def test_what_would_be_lost_silently_is_refused(case):
    test_what_no_new_object_can_be_given_is_refused(*LOST[case])


def test_an_alias_of_a_stream_is_the_stream_of_the_new_run():
    before, after = ({"task": _with(), "stream": iter([1])} for _ in range(2))
    saved = ObjectState({"task": before["task"]}, left_out={"data.train": before["stream"]})
    before["task"].late = before["stream"]
    there = ObjectState({"task": after["task"]}, left_out={"data.train": after["stream"]})
    there.load_state_dict(saved.state_dict())
    assert after["task"].late is after["stream"]


def test_object_of_another_class_is_refused():
    saved, there = Counter(), Average(nn.Linear(1, 1))
    objects = ObjectState({"task": saved})
    saved.calls = 1
    with pytest.raises(CheckpointError, match="it is a Average, not a Counter"):
        ObjectState({"task": there}).load_state_dict(objects.state_dict())


@given(
    values=st.lists(st.integers(0, 3), min_size=2, max_size=8),
    kind=st.sampled_from(
        [torch.uint8, torch.int64, torch.float16, torch.float32, torch.complex64]
    ),
    data=st.data(),
)
def test_order_of_a_tensor_is_part_of_its_signature(values, kind, data):
    other = data.draw(st.permutations(values))
    tensors = [torch.tensor(one).to(kind) for one in (values, other)]
    signatures = [tensor_signature(one) for one in tensors]
    assert (signatures[0] == signatures[1]) == (values == list(other))


def test_order_of_a_long_tensor_is_part_of_its_signature():
    tensor = torch.zeros(200_001, dtype=torch.uint8)
    found = set()
    for place in (0, 5, 6, 65_535, 65_536, 131_072, 200_000):
        tensor[place] = 1
        found.add(tensor_signature(tensor))
        tensor[place] = 0
    assert len(found) == 7


def test_what_may_be_another_one_in_each_process():
    def told(value):
        return ObjectState({"task": Counter(value)}).compared()["task Counter calls"][1]

    here, name = tempfile.gettempdir(), "sub/a.png"
    same = [
        (f"{here}/one", f"{here}/two/three"),
        (f"/node-1/{name}", f"/node-2/{name}"),
        (torch.device("cuda", 0), torch.device("cuda", 1)),
    ]
    for pair in same:
        assert len(set(map(told, pair))) == 1
    others = [
        (f"/node-1/{name}", "/node-1/b.png"),
        ("one", "two"),
        (torch.device("cuda", 0), torch.device("cpu")),
    ]
    for pair in others:
        assert len(set(map(told, pair))) == 2
