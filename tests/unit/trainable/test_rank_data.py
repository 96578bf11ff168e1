"""The ranks of a trial: over all of them, a window is what it is for one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from tests.unit.trainable.conftest import Toy
from tests.unit.trainable.test_data import CPU, NowAndThen, Numbers
from trainable.build import build_parts
from trainable.config import LoaderConfig, TrainConfig
from trainable.data import LoaderSource, SampledPlan, SplitReading, TensorSource, WindowPlan
from trainable.errors import ConfigError
from trainable.ranks import WHOLE, RankShare
from trainable.task import Data

RANKS = st.integers(1, 6)


def _chained(lists):
    return list(itertools.chain.from_iterable(lists))


def _shares(size):
    return [RankShare(rank, size) for rank in range(size)]


@given(length=st.integers(0, 200), size=RANKS)
def test_parts_are_the_window_in_order(length, size):
    window = list(range(length))
    parts = [window[share.part(length)] for share in _shares(size)]
    assert [one for part in parts for one in part] == window
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parts[0] or not window


def _plan(kind, samples, batch, micro, drop_last):
    if kind == "shuffled":
        return WindowPlan(samples, batch, micro, seed=3, drop_last=drop_last)
    given = range(samples)
    if kind == "lists":
        given = [given[at : at + 1 + at % batch] for at in range(0, samples, batch)]
    return SampledPlan(
        given,
        TrainConfig(
            batch_size=batch, accumulation=batch // micro, loader=LoaderConfig(drop_last=drop_last)
        ),
        in_batches=kind == "lists",
        num_indices=samples,
        seed=3,
    )


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["shuffled", "sampler", "lists"]),
    samples=st.integers(1, 40),
    micro=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    drop_last=st.booleans(),
    size=RANKS,
)
def test_windows_of_all_ranks_are_those_of_one_process(
    kind, samples, micro, accumulation, drop_last, size
):
    batch = micro * accumulation
    samples += batch if drop_last else 0
    plan = _plan(kind, samples, batch, micro, drop_last)
    data = torch.arange(samples)

    def windows(share):
        source = TensorSource((data,), plan, device=CPU, share=share)
        assert source.plan is plan
        return [[part.tolist() for (part,) in window] for window in source.windows(0)]

    expected, of_ranks = windows(WHOLE), [windows(share) for share in _shares(size)]
    for number, window in enumerate(expected):
        parts = [ranks[number] for ranks in of_ranks]
        assert _chained(_chained(part) for part in parts) == _chained(window)
        limit = -(-max(map(len, window), default=1) // size) if kind == "lists" else None
        for part in parts:
            assert all(part), "no forward pass without samples"
            assert len(part) <= accumulation
            assert limit is None or all(len(one) <= max(limit, 1) for one in part)
    assert all(len(ranks) == len(expected) for ranks in of_ranks)


def _read(source, epoch=1):
    found = [list(window) for window in source.windows(epoch)]
    source.close()
    return found


def _rows(window):
    return [
        tuple(row.tolist() for row in sample)
        for batch in window
        for sample in zip(*batch, strict=True)
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["shuffled", "sampler"])
def test_a_sample_is_augmented_alike_on_any_rank(kind, workers):
    def source(share, workers=0):
        return LoaderSource(
            Numbers(23),
            _plan(kind, 23, 8, 4, drop_last=False),
            SplitReading("train", CPU, loader=LoaderConfig(num_workers=workers), share=share),
        )

    expected = [_rows(window) for window in _read(source(WHOLE))]
    of_ranks = [_read(source(share, workers)) for share in _shares(3)]
    together = [_chained(_rows(ranks[number]) for ranks in of_ranks) for number in range(3)]
    assert together == expected


def test_a_part_may_be_empty_in_a_loader():
    plan = WindowPlan(7, 5, 5, shuffle=False)
    source = LoaderSource(
        NowAndThen(7),
        plan,
        SplitReading("train", CPU, loader=LoaderConfig(num_workers=1), share=RankShare(2, 3)),
    )
    assert [[batch[0].tolist() for batch in window] for window in _read(source)] == [[[4]], []]


def _noise(samples):
    return torch.stack([sample[0] for sample in samples]), torch.rand(())


def test_collate_draws_other_numbers_on_each_rank():
    drawn = []
    for share in [WHOLE, *_shares(3)]:
        reading = SplitReading("train", CPU, collate=_noise, share=share)
        source = LoaderSource(Numbers(9), WindowPlan(9, 9, 9), reading)
        drawn.append(_read(source)[0][0][1].item())
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) == 3


class Ready(IterableDataset):
    """Ready batches."""

    def __iter__(self):
        return (torch.zeros(2, 5) for _ in range(6))


class Batches(Toy):
    """The toy task with ready batches."""

    def build_data(self):
        return Data(Ready(), Ready(), batched=True)


def test_fewer_ready_batches_than_ranks_are_refused(configure):
    config = configure(budget={"steps": 2, "report_every": 1}, accumulation=2)
    for workers in (1, 2):
        build_parts(config.model_copy(update={"workers": workers}), device=CPU, task=Batches())
    with pytest.raises(ConfigError, match="accumulation: 3") as refused:
        build_parts(config.model_copy(update={"workers": 3}), device=CPU, task=Batches())
    assert refused.value.key == "train.accumulation"
