"""A sweep whose trials have two ranks: loss, stop and failure of the second, and its end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.commandline import CommandLine

pytestmark = pytest.mark.usefixtures("module_store")

SPEC = """
name: ranks
task: {{name: "ranks_task:Ranked", directory: {directory}, what: nothing}}
metric: val/loss
mode: min
trials: 3
budget: {{epochs: 3}}
space: {{task.what: {{choice: [nothing, raises, stopped]}}}}
search: {{sampler: grid}}
train: {{batch_size: 8}}
resources: {{cpu: 1, gpu: 0, workers: 2}}
failures: {{step_timeout: 5s}}
"""


@pytest.fixture(scope="module")
def swept(module_cli: CommandLine) -> CommandLine:
    directory = module_cli.directory / "processes"
    directory.mkdir()
    shutil.copy(Path(__file__).with_name("ranks_task.py"), module_cli.directory)
    module_cli.write("s.yaml", SPEC.format(directory=directory))
    module_cli.ok("run", "s.yaml")
    return module_cli


def _processes(cli: CommandLine, what: str, rank: int) -> list[int]:
    found = (cli.directory / "processes").glob(f"{what}-{rank}-*")
    return [int(path.name.rpartition("-")[2]) for path in found]


def _trial(cli: CommandLine, what: str) -> dict[str, Any]:
    return next(one for one in cli.json("trials", "ranks") if one["params"]["task.what"] == what)


def test_lost_rank_is_retried(swept: CommandLine) -> None:
    """Of killed ranks: row 40 of the fault matrix."""
    one = _trial(swept, "stopped")
    assert (one["state"], one["attempts"]) == ("complete", 2)
    assert one["epoch"] == 3
    (lost,) = swept.json("show", "ranks", str(one["number"]))["lost_workers"]
    assert "rank 1" in lost


def test_failed_rank_is_the_failure_of_the_trial(swept: CommandLine) -> None:
    one = _trial(swept, "raises")
    assert (one["state"], one["attempts"]) == ("failed", 1)
    assert "rank 1" in one["reason"]
    assert "ZeroDivisionError: as the test asks for" in one["reason"]
    details = swept.json("show", "ranks", str(one["number"]))
    assert "ranks_task.py" in details["traceback"]
    assert "rank 1" in details["traceback"]


def test_ranks_end_with_the_sweep(swept: CommandLine) -> None:
    left = [
        int(path.name.rpartition("-")[2]) for path in (swept.directory / "processes").glob("*-*-*")
    ]
    assert left
    assert not [pid for pid in left if psutil.pid_exists(pid)]
    assert os.getpid() not in left


def test_each_trial_has_ranks_of_its_own(swept: CommandLine) -> None:
    for rank in (0, 1):
        found = [_processes(swept, what, rank) for what in ("nothing", "raises", "stopped")]
        assert len({pid for pids in found for pid in pids}) == 3


def test_each_rank_has_its_own_output(swept: CommandLine) -> None:
    number = _trial(swept, "nothing")["number"]
    text = swept.ok("show", "ranks", str(number), "--log")
    assert text.index("rank 0 trains") < text.index("[rank 1]") < text.index("rank 1 trains")


def test_devices_of_all_ranks_are_counted(swept: CommandLine) -> None:
    one = swept.json("show", "ranks", "0")
    assert one["workers"] == 2
    assert one["cpu_seconds"] == pytest.approx(2 * one["duration"], rel=0.01)


@pytest.mark.chaos
def test_trial_is_reproduced_without_ray_bit_for_bit(swept: CommandLine) -> None:
    number = str(_trial(swept, "nothing")["number"])
    found = swept.json("audit", "ranks", number, "--reproduce")
    assert found["is_equal"], found
    assert found["states"], "states of several ranks are compared, too"
