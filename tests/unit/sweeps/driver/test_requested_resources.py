"""The resources of a trial, as Tune receives them."""

from __future__ import annotations

import pytest
from ray.tune import PlacementGroupFactory

from sweeps.config.trial_run import rank_timeout
from sweeps.driver.tune_loop import _requested
from sweeps.engine.resources import ResourcePlan


def test_trial_of_one_worker_has_no_bundles() -> None:
    assert _requested(ResourcePlan(2, 0.5, 4)) == {"cpu": 2, "gpu": 0.5}


@pytest.mark.parametrize(("placement", "strategy"), [("pack", "PACK"), ("spread", "SPREAD")])
def test_each_worker_has_a_bundle(placement: str, strategy: str) -> None:
    made = _requested(ResourcePlan(2, 1, 4, "", 3, placement))  # type: ignore[arg-type]
    assert made == PlacementGroupFactory([{"CPU": 2, "GPU": 1}] * 3, strategy=strategy)
    without = _requested(ResourcePlan(1, 0, 4, "", 2, placement))  # type: ignore[arg-type]
    assert without.bundles == [{"CPU": 1}] * 2


def test_lost_rank_is_known_before_the_hang_of_the_trial() -> None:
    assert rank_timeout(60.0) < 60
    assert rank_timeout(None) >= 600
    assert rank_timeout("off") > 24 * 3600
