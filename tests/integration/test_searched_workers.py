"""A sweep that searches the number of ranks: interrupted, resumed, and each trial as it says."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from sweeps.config.searched_workers import WORKERS
from tests.integration.commandline import CommandLine, wait_until
from tests.time_limits import scaled

pytestmark = pytest.mark.usefixtures("module_store")

SPEC = """
name: numbers
task: {{name: "ranks_task:Ranked", directory: {directory}, what: nothing}}
metric: val/loss
mode: min
trials: 2
budget: {{epochs: 100}}
space: {{{workers}: {{choice: [2, 1]}}}}
search: {{sampler: grid, try_first: []}}
train: {{batch_size: 8}}
resources: {{cpu: 1, gpu: 0}}
"""


def test_each_trial_has_its_number_of_ranks(module_cli: CommandLine) -> None:
    cli = module_cli
    directory = cli.directory / "processes"
    directory.mkdir()
    shutil.copy(Path(__file__).with_name("ranks_task.py"), cli.directory)
    cli.write("s.yaml", SPEC.format(directory=directory, workers=WORKERS))
    driver = cli.start("run", "s.yaml")
    wait_until(lambda: list(directory.glob("nothing-1-*")), every=0.02)
    driver.send_signal(signal.SIGINT)
    assert driver.wait(scaled(60)) == 130, "it ended before it was interrupted"
    cli.ok("resume", "numbers")
    trials = cli.json("trials", "numbers")
    assert [one["state"] for one in trials] == ["complete"] * 2
    assert [one["params"][WORKERS] for one in trials] == [2, 1]
    assert trials[0]["attempts"] == 2
    for number, workers in ((0, 2), (1, 1)):
        shown = cli.json("show", "numbers", str(number))
        assert shown["workers"] == (workers if workers > 1 else None)
        logged = cli.ok("logs", "numbers", str(number))
        assert ("[rank 1]" in logged) == (workers == 2)
