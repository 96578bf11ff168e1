"""Kill a training in many combinations of place and configuration; each resumes to the same bits.

Each case trains to the end; then again, in other processes, up to the kill of one of its ranks
(`os._exit(1)` or SIGKILL), and from there in new ones. Equal must be: parameters, buffers,
optimizer, schedule, scaler, counters, every random generator and position of each rank, the
samples each step of each rank saw (augmentation included), and every logged metric that was not
measured. A slice: `tests/integration/test_resume_after_exit.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.kill_cases import AXES, SEED, Case, is_refused, pairs, select
from tests.chaos.processes import Processes

pytestmark = pytest.mark.chaos
CASES = select()
_skipped: Counter[str] = Counter()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    print(f"{len(CASES)} cases of CHAOS_SEED={SEED}")
    with Processes() as started:
        yield started


@pytest.mark.seeds("S15", "S17")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_killed_run_equals_uninterrupted_run(
    processes: Processes, tmp_path: Path, case: Case
) -> None:
    began = processes.ends_alike(case, tmp_path)
    if case.every != "1 epoch" and case.kill != "warmup":
        assert began["step"] + began["skipped"] > 0, "nothing was saved; the case shows nothing"
    _skipped["before"] += began["skipped"]
    _skipped["after"] += began["skipped_at_last"] - began["skipped"]


def test_fp16_skipped_steps_before_and_after_a_kill() -> None:
    """Otherwise the matrix would say nothing about the scaler."""
    assert _skipped["before"] > 0, _skipped
    assert _skipped["after"] > 0, _skipped


def test_selection_covers_every_pair() -> None:
    met = set().union(*map(pairs, CASES))
    axes = [len(values) for values in AXES.values()]
    refused = len(AXES["average"]) - 1  # with a schedule-free optimizer
    refused += len(AXES["victim"]) - 1  # with a single rank
    assert len(met) == (sum(axes) ** 2 - sum(n * n for n in axes)) // 2 - refused
    assert not any(is_refused(case._asdict()) for case in CASES)
    assert len(CASES) == len(set(CASES)) >= 200
    assert sum(case.data.endswith("processes") for case in CASES) >= 15
