"""The flagship at scale: whatever is killed, wherever it is killed, it ends bit for bit the same.

Each case trains to the end; then again up to the kill, and from there with fresh objects. Equal
must be: parameters, buffers, optimizer, schedule, scaler, counters, every random generator, the
samples each step saw (augmentation included), and every logged metric that was not measured.
`tests/integration/test_resume_exit.py` does the same with processes that really die.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch

from tests.chaos.cases import AXES, SEED, Case, pairs, select
from tests.chaos.runs import Killed, differences, ending, open_case, train

pytestmark = pytest.mark.chaos
CASES = select()
_skipped: Counter[str] = Counter()


@pytest.fixture(autouse=True)
def _determinism_as_it_was() -> Iterator[None]:
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="module", autouse=True)
def _seed_in_the_report() -> None:
    print(f"{len(CASES)} cases of CHAOS_SEED={SEED}")


def _kill() -> None:
    raise Killed


@pytest.mark.seeds("S15")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_killed_run_ends_like_one_that_was_not(tmp_path: Path, case: Case) -> None:
    trainer, task = open_case(case, tmp_path / "whole")
    with trainer:
        train(case, trainer)
        whole = ending(trainer, task, tmp_path / "whole")

    cut, cut_task = open_case(case, tmp_path / "cut", _kill)
    with pytest.raises(Killed):
        train(case, cut, _kill)
    # Here what was being written at the kill gets there; a real death may be before or after it.
    cut.store.wait()
    # A real death takes the loader's processes along and closes the file of the curve.
    cut._train.close()
    cut._history._file.close()
    _disturb_every_generator()

    trainer, task = open_case(case, tmp_path / "cut")
    started = trainer.state.progress
    skipped_before, began_at = started.skipped, (started.epoch, started.window)
    with trainer:
        train(case, trainer)
        resumed = ending(trainer, task, tmp_path / "cut")

    assert cut_task.seen == whole["seen"][: len(cut_task.seen)]
    rest = whole["seen"][len(whole["seen"]) - len(task.seen) :]
    assert differences(whole | {"seen": rest}, resumed) == []
    assert 0 < len(task.seen) <= len(whole["seen"])
    if case.every != "1 epoch" and case.kill != "warmup":
        assert began_at > (0, 0), "nothing was saved before the kill; the case shows nothing"
    _skipped["before"] += skipped_before
    _skipped["after"] += resumed["state"]["progress"]["skipped"] - skipped_before


def test_fp16_skipped_steps_before_and_after_a_kill() -> None:
    """Otherwise the matrix would say nothing about the scaler."""
    assert _skipped["before"] > 0, _skipped
    assert _skipped["after"] > 0, _skipped


def test_selection_has_every_pair_and_is_large_enough() -> None:
    met = set().union(*map(pairs, CASES))
    axes = [len(values) for values in AXES.values()]
    assert len(met) == (sum(axes) ** 2 - sum(n * n for n in axes)) // 2
    assert len(CASES) == len(set(CASES)) >= 200
    assert sum(case.data == "processes" for case in CASES) >= 15


def _disturb_every_generator() -> None:
    torch.manual_seed(99)
    numpy.random.seed(99)
    random.seed(99)
