"""Windows: their samples, their order, and that seed and position alone decide both."""

from __future__ import annotations

import multiprocessing
import random

import numpy
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from trainable import data
from trainable.config import LoaderConfig
from trainable.data import LoaderSource, SplitReading, TensorSource, WindowPlan, move, open_source
from trainable.errors import ConfigError

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("micro", [12, 3, 1])
def test_generator_state_is_read_once_per_window(monkeypatch, micro):
    looks = []

    class Counted(data.HostRngState):
        def __init__(self):
            looks.append(None)
            super().__init__()

    monkeypatch.setattr(data, "HostRngState", Counted)
    plan = WindowPlan(43, 12, micro)
    source = LoaderSource(list(range(43)), plan, SplitReading("train", CPU))
    assert sum(len(batch) for window in source.windows(0) for batch in window) == 43
    assert len(looks) == plan.windows


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


def test_tensor_data_sets_are_indexed_directly():
    plan = WindowPlan(4, 2, 2)
    tensors = (torch.arange(4), torch.arange(4))
    for samples in (tensors, TensorDataset(*tensors)):
        source = open_source(samples, plan, SplitReading("val", CPU))
        assert isinstance(source, TensorSource)


def test_validation_keeps_the_order_of_the_data():
    source = TensorSource((torch.arange(5),), WindowPlan(5, 2, 2, shuffle=False), device=CPU)
    assert [w[0][0].tolist() for w in source.windows(0)] == [[0, 1], [2, 3], [4]]


def test_move_keeps_containers_and_other_objects():
    from collections import namedtuple

    Pair = namedtuple("Pair", "a b")
    batch = {"x": [torch.ones(1), "text"], "y": Pair(torch.ones(2), None), "z": (1,)}
    moved = move(batch, torch.device("meta"))
    assert moved["x"][0].device.type == moved["y"].a.device.type == "meta"
    assert (moved["x"][1], moved["y"].b, moved["z"]) == ("text", None, (1,))
    assert type(moved["y"]) is Pair
