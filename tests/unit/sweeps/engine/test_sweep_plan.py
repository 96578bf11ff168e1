"""The plan of a sweep: its numbers, its sentences, and when it warns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sweeps.engine.resources import ResourcePlan
from sweeps.engine.sweep_plan import SweepPlan, make_plan
from sweeps.engine.task_check import TaskFacts
from sweeps.spec.spec import SweepSpec
from tests.golden.messages import compare_messages
from tests.specs import make_spec

SPACE = "space:\n  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}\n"
ASHA = "early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}\n"
FACTS = {
    "steps_per_report": 100,
    "step_seconds": 0.5,
    "evaluation_seconds": 10.0,
    "checkpoint_bytes": 50 * 2**20,
    "process_bytes": 2**30,
}
CUSTOM_LOOP: dict[str, Any] = {
    "own_loop": True,
    "steps_per_report": 0,
    "step_seconds": None,
    "process_bytes": None,
    "checkpoint_bytes": 0,
}
COLUMNS = 80


def _spec(more: str) -> SweepSpec:
    return make_spec(more, trials=24, budget="{epochs: 10}")


def _plan(
    more: str = "",
    at_once: int = 4,
    memory: int | None = 16 * 2**30,
    **facts: Any,
) -> SweepPlan:
    spec = _spec(more if "space:" in more else SPACE + more)
    resources = ResourcePlan(1, 0, at_once)
    return make_plan(spec, resources, TaskFacts(**(FACTS | facts)), memory=memory)


def test_expected_epochs_do_not_follow_from_measured_times() -> None:
    """`sweep check` and `sweep run` measure apart, and say the same number."""
    plans = [
        _plan(ASHA, step_seconds=seconds, build_seconds=10 * seconds) for seconds in (1e-4, 2)
    ]
    assert plans[0].simulation == plans[1].simulation
    assert plans[0].expected_epochs == plans[1].expected_epochs


def test_hours_are_those_of_the_expected_epochs() -> None:
    plan = _plan(ASHA)
    assert (plan.rungs, plan.max_epochs) == ((1, 3), 240)
    assert 24 * 1 + 8 * 2 + 8 / 3 * 7 < plan.expected_epochs < 120
    assert plan.epoch_seconds == pytest.approx(60, rel=0.01)
    assert plan.seconds is not None
    # at the end, the last trials have the machine for themselves
    assert plan.expected_epochs * 60 / 4 < plan.seconds < 1.5 * plan.expected_epochs * 60 / 4
    found = plan.as_dict()
    assert found["hours"] == plan.seconds / 3600
    assert found["device_seconds"] == pytest.approx(plan.expected_epochs * 60, rel=0.01)
    assert found["expected_steps"] == round(plan.expected_epochs * 100)


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ("", 3),
        ("checkpoint: {keep: 4}\n", 5),
        ("checkpoint: {keep: 20}\n", 10),
        ("checkpoint: {keep: 20, every: 5 steps}\n", 21),
    ],
)
def test_disk_holds_the_newest_checkpoints_and_the_best(more: str, kept: int) -> None:
    plan = _plan(more)
    assert plan.checkpoints_kept == kept
    assert plan.disk_bytes == 24 * kept * 50 * 2**20


@pytest.mark.parametrize(("limit", "can_end"), [(8, True), (9, False)])
def test_patience_beyond_the_budget_is_named(limit: int, *, can_end: bool) -> None:
    plan = _plan(f"early_stopping: {{scheduler: none, patience: {limit}}}\n")
    (sentence,) = (text for _, text in plan.rows() if text.startswith("patience"))
    assert ("may end" in sentence) == can_end


def test_custom_loop_has_neither_hours_nor_sizes() -> None:
    plan = _plan(**CUSTOM_LOOP)
    assert (plan.seconds, plan.disk_bytes) == (None, None)
    assert [word for word, _ in plan.rows()] == ["trials", "stopping", "time"]
    assert plan.as_dict()["device_seconds"] is None


def test_plan_warns_of_memory_and_disk(request: pytest.FixtureRequest) -> None:
    assert replace(_plan(), disk_free_bytes=2**40).warnings() == []
    plan = replace(_plan(at_once=20), disk_free_bytes=2**30)
    compare_messages(request, plan.warnings())
    assert _plan(at_once=20, memory=None).warnings() == []


CASES = {
    "halving": (ASHA, {}),
    "nothing stopped": ("", {}),
    "patience": ("early_stopping: {scheduler: none, patience: 3}\n", {}),
    "median": ("early_stopping: {scheduler: median}\nstop: {hours: 0.5}\n", {}),
    "a population": ("early_stopping: {scheduler: pbt}\n", {}),
    "one trial": ("concurrency: 1\nstop: {hours: 2}\n", {"gpu_bytes": 3 * 2**30}),
    "a searched model": (
        "space:\n  task.width: {int: [64, 4096]}\n  train.batch_size: {choice: [32, 64]}\n",
        {},
    ),
    "a custom loop": (
        "",
        CUSTOM_LOOP,
    ),
    "large numbers": (
        "early_stopping: {scheduler: asha_promote, reduction: 2}\n",
        {"step_seconds": 1234.5, "process_bytes": 2**37, "checkpoint_bytes": 2**32},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_wording_of_a_plan(case: str, request: pytest.FixtureRequest) -> None:
    more, facts = CASES[case]
    plan = _plan(more, at_once=1 if case == "one trial" else 4, **facts)
    lines = [f"{word:<10}{sentence}" for word, sentence in plan.rows()]
    compare_messages(request, [*lines, plan.in_one_line()])
    assert max(map(len, lines)) <= COLUMNS - 2
    assert len(plan.in_one_line()) <= COLUMNS - 2


@pytest.mark.parametrize("sharding", ["none", "fsdp"])
def test_ranks_divide_a_step_and_what_is_sharded(sharding: str) -> None:
    more = "resources: {workers: 3, gpu: 0}\n" + SPACE
    more += f"train: {{batch_size: 64, accumulation: 4, sharding: {sharding}}}\n"
    # 3,000 bytes of weights, of which a matrix of one row cannot be divided
    plan = _plan(more, weight_bytes=3_000, shard_bytes=1_200, optimizer_bytes=6_000)
    assert plan.ranks is not None
    assert plan.ranks.micro_batch_size == 6
    # weights, gradients and two moments; whole ones also have the exchanged copy of the gradients
    assert plan.ranks.rank_bytes == (4 * 1_200 if sharding == "fsdp" else 12_000 + 3_000)
    verb = "saves 7.031 KiB" if sharding == "fsdp" else "would save 9.961 KiB"
    assert verb in " ".join(plan.ranks.sentences())
    assert plan.as_dict()["ranks"]["rank_bytes"] == plan.ranks.rank_bytes


def test_plan_of_searched_ranks_is_that_of_the_most() -> None:
    space = "space:\n  resources.workers: {choice: [1, 4]}\n"
    spec = _spec(space)
    resources = ResourcePlan(1, 0, 2, workers=4, fewest_workers=1, most_trials=8, capacity=8)
    facts = TaskFacts(**FACTS, weight_bytes=12, shard_bytes=4)
    plan = make_plan(spec, resources, facts, memory=None)
    assert plan.ranks is not None
    assert (plan.ranks.workers, plan.ranks.fewest_workers) == (4, 1)
    assert plan.ranks.sentences()[0].startswith("1 to 4 for each trial; of 4, each takes ")
    assert (plan.trials_at_once, plan.cpu, plan.trial_memory_bytes) == (2, 4, 4 * 2**30)
    assert plan.measured_with == {"resources.workers": 4}
