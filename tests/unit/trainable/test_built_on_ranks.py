"""What ranks build differently: all have what the first one has built, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rank_training import Runs, config, curve, newest_state, to_end, train_in_turn
from tests.saved_objects import saved_values
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.config import TrialConfig
from trainable.loop import Trainer

pytestmark = pytest.mark.integration

CUT = 6
"""In the second epoch of three."""
ALONE = ("Apart", "Placed", "Calibrating", "Warming", "Stepping")
"""Also trained by one process."""
SAME = {
    "Apart": "Apart",
    "Placed": "Placed",
    "Calibrating": "Calibrating",
    "Warming sharded": "Warming",
    "Stepping sharded": "Stepping",
}


def _config(workers: int, name: str, **options: Any) -> TrialConfig:
    train = {one: options.pop(one) for one in ("sharding",) if one in options}
    task = {"name": f"tests.rank_built_tasks:{name}", **options}
    return config(workers, task, epochs=3, accumulation=1, every="1 epoch", **train)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One group of two processes trains all runs."""
    root = tmp_path_factory.mktemp("built")
    plan = {
        **{name: _config(2, name) for name in ALONE},
        "Warming sharded": _config(2, "Warming", sharding="fsdp"),
        "Stepping sharded": _config(2, "Stepping", sharding="fsdp"),
        "cut": _config(2, "Unseeded"),
        "resumed": _config(2, "Unseeded"),
        "more": _config(2, "Placed", more=True),
        "sharded": _config(2, "Unseeded", sharding="fsdp"),
        **{name: _config(2, name) for name in ("Typed", "Averaging")},
    }
    found = train_in_turn(root, plan, cut=CUT)
    for name in ALONE:
        with open_trainer(_config(1, name), root / f"{name} alone", device="cpu") as alone:
            assert isinstance(alone, Trainer)
            to_end(alone)
    return found


@pytest.mark.parametrize("name", SAME)
def test_curve_is_that_of_one_process(runs: Runs, name: str) -> None:
    assert name not in runs.errors
    rows, expected = curve(runs.root / name), curve(runs.root / f"{SAME[name]} alone")
    assert len(rows) == len(expected) == 12
    for row, other in zip(rows, expected, strict=True):
        assert row.metrics == pytest.approx(other.metrics, rel=1e-12, abs=1e-7)
        assert row.metrics["train/loss"] == pytest.approx(other.metrics["train/loss"], rel=1e-12)


def test_all_ranks_keep_what_the_first_one_has_built(runs: Runs) -> None:
    state = newest_state(runs.root / "Apart")
    (second,) = state["ranks"]
    parts = ("task", "objects")
    assert list(state_differences(*({k: one[k] for k in parts} for one in (state, second)))) == []
    sent = saved_values(state, "task").keys()
    assert sent >= {"table", "array", "by_name", "rate", "mode", "more", "weight", "own"}
    assert saved_values(state, "model").keys() == {"rate"}


def test_resumed_run_keeps_what_was_drawn(runs: Runs) -> None:
    assert runs.others["cut"] == runs.others["resumed"] == ""
    assert not runs.errors.keys() & {"cut", "resumed", "sharded"}
    for name in ("cut", "sharded"):
        drawn = [row.metrics["offset"] for row in curve(runs.root / name)]
        assert len(drawn) == 12
        assert drawn == pytest.approx(drawn[:1] * 12, rel=1e-12)
    (second,) = newest_state(runs.root / "cut")["ranks"]
    held = saved_values(second, "task")
    drawn = [row.metrics["offset"] for row in curve(runs.root / "cut")]
    assert held["offset"] == pytest.approx(drawn[0], rel=1e-12)


def test_what_a_process_has_of_its_own_stays(runs: Runs) -> None:
    assert "more" not in runs.errors
    assert runs.others["Placed"] == runs.others["more"] == ""
    assert newest_state(runs.root / "Placed")["objects"] == {}


@pytest.mark.parametrize(("name", "said"), [("Typed", "best")])
def test_what_cannot_be_sent_is_refused(runs: Runs, name: str, said: str) -> None:
    for message in (str(runs.errors[name]), runs.others[name].removeprefix("task: ")):
        assert f"{name}.{said}" in message
        assert "is another one on another rank" in message
        assert "resources.workers: 1" in message


@pytest.mark.parametrize(
    ("name", "weight"), [("Averaging", "temperature"), ("Stepping", "last.bias")]
)
def test_weight_that_no_exchange_makes_alike_is_named(runs: Runs, name: str, weight: str) -> None:
    message = str(runs.errors[name])
    assert "the weights of rank 1 differ" in message
    assert f"the first of them is {weight};" in message
    assert weight in runs.others[name]
