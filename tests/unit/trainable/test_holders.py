"""What a run's code keeps, whatever it is and wherever: cut in two it trains as in one piece."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
import torch

from tests.unit.trainable.holders_task import MADE, PLACES
from trainable.compare_states import state_differences
from trainable.user_code import keep_caches_reachable


@pytest.fixture
def fresh():
    """Make the task by a module that is imported anew, as in a process of its own."""
    name = "tests.unit.trainable.holders_task"
    before = sys.modules[name]

    keep_caches_reachable()

    def make(place, kind):
        del sys.modules[name]
        return importlib.import_module(name).Holding(place, kind)

    yield make
    sys.modules[name] = before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", MADE)
def test_state_is_restored_wherever_it_is_kept(tmp_path, opened, configure, fresh, place, kind):
    config = configure(every="1 step", epochs=2)
    whole = opened(config, tmp_path / "whole", fresh(place, kind))
    told = [row.metrics["train/loss"] for report in whole.events() for row in report.rows]
    seen = []
    cut = opened(
        config,
        tmp_path / "cut",
        fresh(place, kind),
        should_stop=lambda: seen.append(0) or len(seen) == 6,
    )
    found = [row.metrics["train/loss"] for report in cut.events() for row in report.rows]
    assert cut.state.progress.step == 6
    cut.close()
    torch.manual_seed(99)
    random.seed(99)
    cut = opened(config, tmp_path / "cut", fresh(place, kind))
    assert cut.resumed_at == 6
    found += [row.metrics["train/loss"] for report in cut.events() for row in report.rows]
    assert found[-2:] == told[-2:]
    first, second = whole.state.state_dict(), cut.state.state_dict()
    ignored = first["progress"]["metrics"]
    assert not list(state_differences(first, second, ignored=ignored))
