"""Which members of a population copy which, and their new hyperparameters."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweeps.ledger.trials import TrialRecord
from sweeps.search.pbt_exploit import PopulationBasedBandits, explore, select_exploits
from sweeps.spec.search_space import SearchSpace, mutable
from sweeps.spec.space import Choice, Int, LogUniform, QUniform, Uniform
from sweeps.spec.spec import parse_spec

VALUES = st.one_of(st.floats(-10, 10), st.sampled_from([math.nan, math.inf]))


@given(
    st.dictionaries(st.integers(0, 40), VALUES, max_size=20),
    st.floats(0.01, 0.5),
    st.booleans(),
    st.integers(0, 3),
)
def test_worst_members_copy_the_best(
    values: dict[int, float], quantile: float, minimize: bool, seed: int
) -> None:
    found = select_exploits(values, quantile=quantile, minimize=minimize, seed=seed)
    sign = 1 if minimize else -1
    finite = {n: sign * v for n, v in values.items() if math.isfinite(v)}
    loss = {n: finite.get(n, math.inf) for n in values}
    count = min(max(1, int(len(values) * quantile)), len(values) // 2)
    assert len(found) <= count
    assert not found.keys() & set(found.values()), "nobody gives and takes"
    for heir, donor in found.items():
        assert donor in finite
        assert sum(one < loss[donor] for one in loss.values()) < count
        assert sum(one > loss[heir] for one in loss.values()) < count
        assert loss[donor] <= loss[heir]
    if finite and len(values) > 1 and len(finite) >= count:
        assert len(found) == count
    shuffled = dict(random.Random(0).sample(list(values.items()), len(values)))
    assert select_exploits(shuffled, quantile=quantile, minimize=minimize, seed=seed) == found


def test_donors_vary_by_member_and_seed() -> None:
    values = {number: float(number) for number in range(40)}
    drawn = [select_exploits(values, quantile=0.25, minimize=True, seed=seed) for seed in range(3)]
    assert all(found.keys() == set(range(30, 40)) for found in drawn)
    assert all(set(found.values()) <= set(range(10)) for found in drawn)
    assert all(len(set(found.values())) > 3 for found in drawn)
    assert drawn[0] != drawn[1]


SPACE = SearchSpace(
    {
        "train.optimizer.name": Choice(("sgd", "adamw")),
        "train.optimizer.lr": LogUniform(1e-4, 1e-1),
        "train.optimizer.weight_decay": Uniform(0.0, 0.1),
        "train.optimizer.momentum": QUniform(
            0.5, 0.9, 0.1, when=(("train.optimizer.name", ("sgd",)),)
        ),
        "train.clip.max_norm": Choice((0.1, 1.0, 10.0, None)),
        "train.schedule.warmup": Uniform(0.0, 0.3),
        "task.width": Int(8, 64),
    }
)


def test_tunable_parameters_during_training() -> None:
    assert mutable(SPACE) == [
        "train.clip.max_norm",
        "train.optimizer.lr",
        "train.optimizer.momentum",
        "train.optimizer.weight_decay",
    ]


@given(st.integers(0, 10_000), st.floats(0, 1), st.integers(0, 10_000))
def test_explored_values_stay_in_the_space(point: int, resample: float, seed: int) -> None:
    before = SPACE.draw(point)
    assert before is not None
    after = explore(before, SPACE, resample=resample, seed=seed)
    assert SPACE.project(after) == after
    changed = {key for key in before if after[key] != before[key]}
    assert changed <= set(mutable(SPACE))
    assert after == explore(before, SPACE, resample=resample, seed=seed)


def test_without_resampling_values_move_one_step() -> None:
    before: dict[str, Any] = {
        "train.optimizer.name": "sgd",
        "train.optimizer.lr": 0.01,
        "train.optimizer.weight_decay": 0.09,
        "train.optimizer.momentum": 0.7,
        "train.clip.max_norm": 1.0,
        "train.schedule.warmup": 0.1,
        "task.width": 32,
    }
    found = [explore(before, SPACE, resample=0, seed=seed) for seed in range(50)]
    assert {round(one["train.optimizer.lr"], 6) for one in found} == {0.008, 0.012}
    assert {round(one["train.optimizer.weight_decay"], 6) for one in found} == {0.072, 0.1}
    assert {one["train.optimizer.momentum"] for one in found} == {0.6, 0.8}
    assert {one["train.clip.max_norm"] for one in found} == {0.1, 10.0}
    anew = {explore(before, SPACE, resample=1, seed=s)["train.optimizer.lr"] for s in range(50)}
    assert len(anew) == 50


def test_forbidden_exploration_is_not_made() -> None:
    text = """
name: s
task: digits
metric: val/loss
mode: min
trials: 4
budget: {epochs: 4}
space:
  train.optimizer.lr: {uniform: [0.1, 1.0]}
  train.clip.max_norm: {uniform: [0.1, 1.0]}
search: {constraints: [train.optimizer.lr <= train.clip.max_norm]}
early_stopping: {scheduler: pbt}
"""
    space = parse_spec(text, "s.yaml").search_space()
    before = {"train.optimizer.lr": 0.5, "train.clip.max_norm": 0.5}
    found = [explore(before, space, resample=0, seed=seed) for seed in range(30)]
    assert all(space.allows(one) for one in found)
    assert sum(one != before for one in found) > 20


@pytest.mark.parametrize("was", [None, "off", True])
def test_former_choice_is_resampled_after_an_edit(was: Any) -> None:
    key = "train.clip.max_norm"
    space = SearchSpace({key: Uniform(0.1, 10.0)})
    for seed in range(20):
        changed = explore({key: was}, space, resample=0, seed=seed)
        assert space.project(changed) == changed
    members = {
        number: TrialRecord(
            number=number, state="running", params={key: value}, suggested={key: value},
            value=None, reports={1: 1.0, 2: 0.5},
        )
        for number, value in enumerate([was, 1.0, 2.0])
    }  # fmt: skip
    assert len(PopulationBasedBandits(space, members, 2, minimize=True)._gains) == 2
