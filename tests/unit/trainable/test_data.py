"""Windows: their samples, their order, and that seed and position alone decide both."""

from __future__ import annotations

import collections
import dataclasses
import enum
import multiprocessing
import random
import types
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Dataset

from trainable.config import LoaderConfig
from trainable.data import LoaderSource, SplitReading, TensorSource, WindowPlan, move, pin
from trainable.errors import ConfigError, TaskError

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


class Numbers(Dataset):
    """Sample i is (i, a random number from each generator)."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        draws = [torch.rand(()).item(), numpy.random.rand(), random.random()]
        return torch.tensor(index), torch.tensor(draws, dtype=torch.float64)


def _loader(plan, workers=0, samples=43):
    return LoaderSource(
        Numbers(samples),
        plan,
        SplitReading("train", CPU, loader=LoaderConfig(num_workers=workers)),
    )


def _sizes(source, epoch=0, start=0):
    return [[len(batch[0]) for batch in window] for window in source.windows(epoch, start)]


def _drawn(source, epoch=0, start=0):
    """Sample index -> its random numbers, over an epoch."""
    found = {}
    for window in source.windows(epoch, start):
        for index, draws in window:
            found |= {int(i): tuple(d.tolist()) for i, d in zip(index, draws, strict=True)}
    return found


@pytest.mark.parametrize("kind", ["tensors", "loader"])
def test_last_window_is_short_in_both_kinds_of_source(kind):
    plan = WindowPlan(43, 12, 3, seed=1)
    source = (
        TensorSource((torch.arange(43),), plan, device=CPU) if kind == "tensors" else _loader(plan)
    )
    assert _sizes(source) == [[3, 3, 3, 3]] * 3 + [[3, 3, 1]]
    assert _sizes(source, start=2) == [[3, 3, 3, 3], [3, 3, 1]]


@pytest.mark.seeds("S19")
def test_drop_last_leaves_whole_windows_only():
    plan = WindowPlan(43, 12, 3, drop_last=True)
    assert plan.windows == 3
    assert _sizes(_loader(plan)) == [[3, 3, 3, 3]] * 3
    with pytest.raises(ConfigError, match="batch_size: 64 and there are 43 samples"):
        WindowPlan(43, 64, 64, drop_last=True)


def test_order_depends_on_seed_and_epoch_only():
    plans = [WindowPlan(43, 12, 3, seed=1), WindowPlan(43, 6, 6, seed=1)]
    torch.manual_seed(5)
    first = plans[0].order(2)
    torch.manual_seed(6)
    assert torch.equal(first, plans[1].order(2))
    assert sorted(first.tolist()) == list(range(43))
    assert not torch.equal(first, plans[0].order(3))
    assert not torch.equal(first, WindowPlan(43, 12, 3, seed=2).order(2))


@pytest.mark.seeds("S15")
@pytest.mark.parametrize("start", [0, 1, 3])
def test_resuming_at_a_window_gives_the_same_samples(start):
    plan = WindowPlan(43, 12, 4, seed=3)
    tensors = TensorSource((torch.arange(43),), plan, device=CPU)
    whole = [torch.cat([b[0] for b in window]) for window in tensors.windows(1)]
    rest = [torch.cat([b[0] for b in window]) for window in tensors.windows(1, start)]
    loaded = [torch.cat([b[0] for b in window]) for window in _loader(plan).windows(1, start)]
    for one, other, third in zip(whole[start:], rest, loaded, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.seeds("S20")
def test_sample_randomness_depends_on_epoch_and_index_only():
    reference = _drawn(_loader(WindowPlan(43, 12, 3, seed=1)))
    assert len(set(reference.values())) == 43
    assert _drawn(_loader(WindowPlan(43, 8, 8, seed=1))) == reference
    workers = _loader(WindowPlan(43, 12, 3, seed=1), workers=2)
    assert _drawn(workers) == reference
    assert _drawn(workers, epoch=1) != reference
    assert _drawn(workers, epoch=0) == reference
    workers.close()
    assert _drawn(_loader(WindowPlan(43, 12, 3, seed=2))) != reference


class NowAndThen(Numbers):
    """Only every seventh sample draws: the first batches may well draw nothing."""

    def __getitem__(self, index):
        draw = numpy.random.randn() if index % 7 == 0 else 0.0
        return torch.tensor(index), torch.tensor([draw])


def test_rarely_random_samples_are_reproducible():
    found = []
    for start, size in ((0, 3), (0, 43), (7, 2)):
        source = LoaderSource(
            NowAndThen(43), WindowPlan(43, size, size), SplitReading("train", CPU)
        )
        found.append(_drawn(source, start=start))
    assert found[0] == found[1]
    assert found[2].items() <= found[0].items()
    assert len(set(found[0].values())) == 8


class OwnGenerator(Numbers):
    """Sample i is (i, a number from a generator that is seeded from torch's seed)."""

    def __getitem__(self, index):
        draw = numpy.random.default_rng(torch.initial_seed() + index).random()
        return torch.tensor(index), torch.tensor([draw])


def test_initial_seed_is_the_same_in_any_loader_process():
    """And another one in each epoch, as without us."""
    found = []
    for workers, epochs, start in ((2, (1,), 0), (1, (0, 1), 0), (2, (1,), 2), (1, (1,), 2)):
        source = LoaderSource(
            OwnGenerator(43),
            WindowPlan(43, 12, 12, seed=3),
            SplitReading("train", CPU, loader=LoaderConfig(num_workers=workers)),
        )
        found.append([_drawn(source, epoch, start) for epoch in epochs])
        source.close()
    (whole,), (other, with_more), *resumed = found
    assert with_more == whole
    assert not other.items() & whole.items()
    assert all(part.items() < whole.items() for (part,) in resumed)


def _masked(samples):
    """Indices, and a random number from each generator as a masking collate draws them."""
    draws = [torch.rand(()).item(), numpy.random.rand(), random.random()]
    return [int(sample) for sample in samples], draws


def _masking(workers=0, seed=1):
    return LoaderSource(
        range(43),
        WindowPlan(43, 12, 5, seed=seed),
        SplitReading("train", CPU, loader=LoaderConfig(num_workers=workers), collate=_masked),
    )


@pytest.mark.seeds("S20")
@pytest.mark.parametrize("workers", [0, 2])
def test_collate_randomness_depends_on_epoch_and_window_only(workers):
    reference = [list(window) for window in _masking().windows(0)]
    draws = [tuple(batch[1]) for window in reference for batch in window]
    assert len(set(draws)) == len(draws)
    random.seed(5), numpy.random.seed(5), torch.manual_seed(5)
    source = _masking(workers)
    for start in (2, 0, 1):
        assert [list(window) for window in source.windows(0, start)] == reference[start:]
    assert [list(window) for window in source.windows(1)] != reference
    source.close()
    assert [list(window) for window in _masking(seed=2).windows(0)] != reference


@pytest.mark.parametrize("made", [lambda: _loader(WindowPlan(43, 12, 12)), _masking])
def test_fetching_preserves_the_process_generators(made):
    source = made()
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    expected = torch.rand(()), numpy.random.rand(), random.random()
    torch.manual_seed(1), numpy.random.seed(1), random.seed(1)
    for window in source.windows(0):
        list(window)
    assert (torch.rand(()), numpy.random.rand(), random.random()) == expected


def test_model_randomness_does_not_change_samples():
    plan = WindowPlan(43, 12, 3, seed=1)
    expected = _drawn(_loader(plan))
    found = {}
    for window in _loader(plan).windows(0):
        for index, draws in window:
            found |= {int(i): tuple(d.tolist()) for i, d in zip(index, draws, strict=True)}
            torch.rand(7), numpy.random.rand(), random.random()
    assert found == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_receives_one_micro_batch_at_a_time(workers):
    source = LoaderSource(
        Numbers(10),
        WindowPlan(10, 6, 2, shuffle=False),
        SplitReading("val", CPU, loader=LoaderConfig(num_workers=workers), collate=_indices),
    )
    assert [list(window) for window in source.windows(0)] == [
        [[0, 1], [2, 3], [4, 5]],
        [[6, 7], [8, 9]],
    ]
    source.close()


def _indices(samples):
    return [int(index) for index, _ in samples]


def test_closing_ends_workers_in_mid_epoch():
    source = _loader(WindowPlan(43, 4, 4), workers=2)
    windows = source.windows(0)
    list(next(windows))
    assert multiprocessing.active_children()
    source.close()
    assert not multiprocessing.active_children()


def test_validation_keeps_the_order_of_the_data():
    source = TensorSource((torch.arange(5),), WindowPlan(5, 2, 2, shuffle=False), device=CPU)
    assert [w[0][0].tolist() for w in source.windows(0)] == [[0, 1], [2, 3], [4]]


# The options of a DataLoader


def _options(device=CPU, **options):
    how = SplitReading("train", device, loader=LoaderConfig(**options))
    return LoaderSource(list(range(10)), WindowPlan(10, 4, 4), how)._loader


@pytest.mark.seeds("S19")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_workers": 1, "prefetch_factor": 5}, (1, 5)),
        ({"num_workers": 1}, (1, 2)),
        ({"prefetch_factor": 5}, (0, None)),
    ],
)
def test_options_reach_the_loader(options, expected):
    """Its processes start anew in each epoch."""
    loader = _options(**options)
    assert (loader.num_workers, loader.prefetch_factor) == expected
    assert not loader.persistent_workers


@pytest.mark.seeds("S19")
def test_persistent_processes_are_refused():
    with pytest.raises(ValueError, match="true, and there are 2 loader processes; they"):
        LoaderConfig(num_workers=2, persistent_workers=True)
    assert "persistent_workers" not in LoaderConfig(num_workers=2).model_dump()
    assert LoaderConfig(persistent_workers=True).num_workers == 0  # as in earlier versions


@pytest.mark.seeds("S19")
@pytest.mark.parametrize(
    ("device", "asked", "pinned"),
    [
        (GPU, None, True),
        (GPU, True, True),
        (GPU, False, False),
        (CPU, None, False),
        (CPU, True, False),
    ],
)
def test_memory_is_pinned_for_a_gpu_alone(device, asked, pinned):
    assert _options(device, pin_memory=asked).pin_memory is pinned


class Moving(torch.Tensor):
    """Writes down how it was asked to move."""

    def to(self, *arguments, **options):
        self.asked = (arguments, options)
        return self


@pytest.mark.seeds("S19")
def test_transfers_do_not_wait():
    tensor = torch.ones(2).as_subclass(Moving)
    move({"x": [tensor]}, GPU)
    assert tensor.asked == ((GPU,), {"non_blocking": True})


# Batches: every tensor is moved, and every type stays

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
        (collections.defaultdict(list, a=[_t()]), lambda b: b["a"]),
        (types.MappingProxyType({"a": _t()}), lambda b: [b["a"]]),
        (Encoding({"a": _t()}), lambda b: [b["a"]]),
        (Pair(_t(), [_t()]), lambda b: [b.x, *b.y]),
        (Two(_t(), _t()), lambda b: [*b]),
        (Rows([_t()]), lambda b: [*b]),
        (collections.deque([_t()], maxlen=4), lambda b: [*b]),
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
