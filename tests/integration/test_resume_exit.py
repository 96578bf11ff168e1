"""Processes that die with os._exit at every kind of moment; fresh ones that go on; one curve.

A representative slice of the matrix in `tests/chaos`: there, death is an exception and one process
holds everything; here, nothing survives but the disk.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.cases import SLICE, Case
from tests.chaos.runs import Killed, differences, ending, open_case, train

COMMAND = [sys.executable, "-m", "tests.chaos.runs"]
HERE = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, dict[str, Any]]:
    """How each case ended: killed in a process of its own, gone on with in another."""
    root = tmp_path_factory.mktemp("exits")
    for verb in ("die", "resume"):
        subprocess.run([*COMMAND, verb, str(root)], cwd=HERE, check=True)
    return {
        case: torch.load(root / str(n) / "ending.pt", weights_only=True)
        for n, case in enumerate(SLICE)
    }


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_deterministic_debug_mode("default")
    torch.set_num_threads(threads)


@pytest.mark.seeds("S15", "S17")
@pytest.mark.parametrize("case", SLICE, ids=str)
def test_process_that_died_ends_like_one_that_did_not(
    tmp_path: Path, resumed: dict[Case, dict[str, Any]], case: Case
) -> None:
    trainer, task = open_case(case, tmp_path)
    with trainer:
        train(case, trainer)
        whole = ending(trainer, task, tmp_path)
    found = resumed[case]
    assert 0 < found.pop("started") < whole["state"]["progress"]["step"]
    whole["seen"] = whole["seen"][-len(found["seen"]) :]
    assert differences(whole, found) == []
    steps = [step for step, _ in found["curve"]]
    assert steps == list(range(1, whole["state"]["progress"]["step"] + 1))


def test_slice_has_every_kind_of_kill() -> None:
    from tests.chaos.cases import AXES

    assert {case.kill for case in SLICE} == set(AXES["kill"])


def test_kill_is_not_caught_by_the_loop(tmp_path: Path) -> None:
    """What the matrix relies on when it lets an exception stand for a death."""

    def kill() -> None:
        raise Killed

    trainer, _ = open_case(SLICE[0], tmp_path, kill)
    with trainer, pytest.raises(Killed):
        train(SLICE[0], trainer)
