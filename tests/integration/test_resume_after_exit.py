"""Processes die with os._exit at every kind of moment; new ones resume; one curve results.

A slice of the matrix in `tests/chaos/test_resume_matrix.py`, one case of each kind of kill.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.kill_cases import AXES, SLICE, Case
from tests.chaos.processes import ENDED, FAILED, Processes


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with Processes() as started:
        yield started


@pytest.mark.seeds("S15", "S17")
@pytest.mark.parametrize("case", SLICE, ids=str)
def test_killed_process_ends_like_uninterrupted_one(
    processes: Processes, tmp_path: Path, case: Case
) -> None:
    assert processes.ends_alike(case, tmp_path)["step"] > 0


def test_slice_has_every_kind_of_kill() -> None:
    assert {case.kill for case in SLICE} == set(AXES["kill"])


def test_failure_is_distinguished_from_death(processes: Processes, tmp_path: Path) -> None:
    """A run that cannot be opened must not pass for one that was killed."""
    (tmp_path / "file").touch()
    assert processes.run(SLICE[0], tmp_path / "file", dies=True) == [FAILED]
    assert processes.run(SLICE[0], tmp_path / "run") == [ENDED]
