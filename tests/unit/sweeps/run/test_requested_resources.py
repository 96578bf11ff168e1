"""The resources of a trial, as Tune receives them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune import PlacementGroupFactory

from sweeps.engine.ray_compat.tune_internals import _may_take_warm_worker
from sweeps.engine.trial_process import group_of


@pytest.mark.parametrize("strategy", ["PACK", "SPREAD"])
def test_each_worker_has_a_bundle(strategy: str) -> None:
    made = group_of({"CPU": 2, "GPU": 1}, strategy, {"workers": 3})
    assert made == PlacementGroupFactory([{"CPU": 2, "GPU": 1}] * 3, strategy=strategy)
    without = group_of({"CPU": 1}, strategy, {"workers": 2})
    assert without.bundles == [{"CPU": 1}] * 2


@pytest.mark.parametrize(("other", "may"), [(1, False), (2, True)])
def test_warm_worker_is_left_to_a_trial_that_can_take_it(other: int, may: bool) -> None:
    """The one has a worker that starts, the other has none, and waits for its group."""
    trials: list[Any] = [
        SimpleNamespace(placement_group_factory=group_of({"CPU": 1}, "PACK", {"workers": number}))
        for number in (1, other)
    ]
    one = {id(trials[0]): "worker"}
    controller = SimpleNamespace(
        _trial_to_actor=SimpleNamespace(get=lambda trial: one.get(id(trial))),
        _actor_manager=SimpleNamespace(is_actor_started=lambda _: True),
        _pending_trials=trials,
    )
    assert _may_take_warm_worker(controller, trials[0]) is may
