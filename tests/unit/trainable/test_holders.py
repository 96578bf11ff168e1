"""What a run's code keeps, whatever it is and wherever: cut in two it trains as in one piece."""

from __future__ import annotations

import importlib
import os
import random
import sys
from itertools import chain, product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.slices import sliced
from tests.unit.trainable.holders_task import MADE, PLACES, REFUSABLE
from trainable.check.compare_states import state_differences
from trainable.errors import TaskError
from trainable.user_code.task_import import keep_caches_reachable


@pytest.fixture
def fresh():
    """Make the task by a module that is imported anew, as in a process of its own."""
    name = "tests.unit.trainable.holders_task"
    before = sys.modules[name]

    keep_caches_reachable()

    def make(*kept, **options):
        del sys.modules[name]
        return importlib.import_module(name).Holding(*kept, **options)

    yield make
    sys.modules[name] = before


def _runs(case):
    """Each kind in two places, and each place with many kinds."""
    kind, place = [*MADE].index(case[0]), PLACES.index(case[1])
    return (place - kind) % len(PLACES) in (0, len(PLACES) // 2)


@pytest.mark.parametrize(("kind", "place"), sliced(product(MADE, PLACES), _runs))
def test_state_is_restored_wherever_it_is_kept(tmp_path, opened, configure, fresh, place, kind):
    _check(tmp_path, opened, configure(every="1 step", epochs=2), lambda: fresh(place, kind), 6)


@pytest.mark.parametrize(
    "kind",
    [
        "shared value",
        "of a thread",
        "context variable",
        "mapped memory",
        "view of memory",
        "view of a mapping",
    ],
)
def test_state_that_pickle_refuses_is_restored_in_what_was_built(
    tmp_path, opened, configure, fresh, kind
):
    _check(tmp_path, opened, configure(every="1 step"), lambda: fresh("task", kind), 6)


def _check(directory, opened, config, make, num_steps):
    """Compare a run that stops after some steps and resumes with one that does not stop."""
    whole = opened(config, directory / "whole", make())
    told = _losses(whole)
    seen = []
    cut = opened(
        config,
        directory / "cut",
        make(),
        should_stop=lambda: seen.append(0) or len(seen) == num_steps,
    )
    found = _losses(cut)
    assert cut.state.progress.step == num_steps
    cut.close()
    torch.manual_seed(99)
    random.seed(99)
    cut = opened(config, directory / "cut", make())
    assert cut.resumed_at == num_steps
    found += _losses(cut)
    assert found[-2:] == told[-2:]
    first, second = whole.state.state_dict(), cut.state.state_dict()
    ignored = first["progress"]["metrics"]
    assert not list(state_differences(first, second, ignored=ignored))


def _losses(trainer):
    return [row.metrics["train/loss"] for report in trainer.events() for row in report.rows]


HOLDERS = st.tuples(st.sampled_from(PLACES), st.sampled_from([*MADE, *REFUSABLE]))


def _drawn(most):
    """Return a test of tasks with one or two states of any kind, each in a place of its own."""

    @settings(
        max_examples=most,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        kept=st.lists(HOLDERS, min_size=1, max_size=2, unique_by=lambda one: one[0]),
        shared=st.booleans(),
        num_steps=st.integers(1, 7),
        every=st.sampled_from(["1 step", "3 steps", "1 epoch"]),
    )
    def test(tmp_path_factory, opened, configure, fresh, kept, shared, num_steps, every):
        directory = tmp_path_factory.mktemp("drawn")
        pairs = list(chain.from_iterable(kept))
        config = configure(every=every, epochs=2)
        refusal = ""
        try:
            _check(directory, opened, config, lambda: fresh(*pairs, shared=shared), num_steps)
        except TaskError as problem:
            refusal = str(problem)
        if refusal:
            assert "a resumed run builds it again" in refusal
            assert {kind for _, kind in kept} & REFUSABLE.keys()
            reports = opened(config, directory / "refused", fresh(*pairs, shared=shared)).events()
            with pytest.raises(TaskError):
                next(reports), next(reports)

    return test


test_drawn_tasks_resume_exactly_or_are_refused = _drawn(25)
test_many_drawn_tasks = pytest.mark.chaos(_drawn(int(os.environ.get("CHAOS_CASES", "120"))))
