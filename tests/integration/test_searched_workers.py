"""A sweep that searches the number of ranks: interrupted, resumed, and each trial as it says."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from sweeps.spec.searched_workers import WORKERS
from tests.integration.commandline import CommandLine, wait_until
from tests.time_limits import scaled

pytestmark = pytest.mark.usefixtures("module_store")

SPEC = """
name: numbers
task: {{name: "ranks_task:Ranked", directory: {directory}, what: nothing}}
metric: val/loss
mode: min
trials: 3
budget: {{epochs: 100}}
space: {{{workers}: {{choice: [4, 2, 1]}}}}
search: {{sampler: grid, try_first: []}}
train: {{batch_size: 8}}
resources: {{cpu: 0.25, gpu: 0}}
"""


@pytest.mark.chaos
def test_each_trial_has_its_number_of_ranks(module_cli: CommandLine) -> None:
    cli = module_cli
    directory = cli.directory / "processes"
    directory.mkdir()
    shutil.copy(Path(__file__).with_name("ranks_task.py"), cli.directory)
    cli.write("s.yaml", SPEC.format(directory=directory, workers=WORKERS))
    driver = cli.start("run", "s.yaml")
    # The last rank of the group of four trains, and beside it the group of two.
    wait_until(
        lambda: all(
            len(list(directory.glob(f"nothing-{rank}-*"))) >= groups
            for rank, groups in ((3, 1), (1, 2))
        ),
        every=0.02,
    )
    driver.send_signal(signal.SIGINT)
    assert driver.wait(scaled(60)) == 130, "it ended before it was interrupted"
    cli.ok("resume", "numbers")
    trials = cli.json("trials", "numbers")
    assert [one["state"] for one in trials] == ["complete"] * 3
    assert [one["params"][WORKERS] for one in trials] == [4, 2, 1]
    assert [one["attempts"] for one in trials[:2]] == [2, 2]
    for number, workers in enumerate((4, 2, 1)):
        shown = cli.json("show", "numbers", str(number))
        assert shown["workers"] == (workers if workers > 1 else None)
        logged = cli.ok("show", "numbers", str(number), "--log")
        ranks = {rank for rank in range(1, 5) if f"[rank {rank}]" in logged}
        assert ranks == set(range(1, workers))
