"""No attempt of a trial meets what another one has changed in its process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine
from tests.slices import sliced

pytestmark = pytest.mark.usefixtures("store")

SPEC = """
name: x
task: marking_task:Marking
metric: val/loss
mode: min
trials: {trials}
concurrency: 1
budget: {{epochs: 4}}
space: {{train.optimizer.lr: {{loguniform: [1.0e-3, 1.0e-2]}}}}
search: {{sampler: random, try_first: []}}
early_stopping: {{scheduler: {rule}}}
resources: {{cpu: 1, workers: {workers}}}
train: {{batch_size: 4, precision: fp32}}
"""
KEEPING = """
import os
from pathlib import Path
import torch
from torch import nn
from trainable import Data, Task

BEGUN = []

class Keeping(Task):
    def build_model(self):
        BEGUN.append(os.getpid())
        Path(f"begun-{len(BEGUN)}").write_text(str(os.getpid()))
        return nn.Linear(2, 2)

    def build_data(self):
        data = torch.ones(8, 2), torch.zeros(8, dtype=torch.long)
        return Data(train=data, val=data)

    def loss(self, model, batch):
        if len(BEGUN) == 2:
            raise RuntimeError("as the test asks for")
        return super().loss(model, batch)
"""


@pytest.mark.parametrize(
    ("rule", "workers"),
    sliced(  # `none`: see `test_case_22_each_trial_begins_with_the_globals_as_imported`
        [("none", 1), ("asha_promote", 1), ("pbt", 1), ("none", 2)],
        ("asha_promote", 1).__eq__,
    ),
)
def test_each_attempt_begins_with_the_module_as_imported(
    cli: CommandLine, rule: str, workers: int
) -> None:
    shutil.copy(Path(__file__).with_name("marking_task.py"), cli.directory)
    cli.write("s.yaml", SPEC.format(trials=4, rule=rule, workers=workers))
    cli.ok("run", "s.yaml")
    trials = cli.json("trials", "x")
    assert [(one["reason"] or "")[:99] for one in trials if one["state"] == "failed"] == []
    assert [one["attempts"] for one in trials] == [1] * 4
    if rule == "none":
        cli.ok("resume", "x", "-s", "trials=5")
        assert cli.json("trials", "x")[4]["state"] == "complete"


def test_reused_worker_trains_one_trial_after_the_other(cli: CommandLine) -> None:
    cli.write("mine.py", KEEPING)
    spec = SPEC.replace("marking_task:Marking", "mine:Keeping")
    cli.write("s.yaml", spec.format(trials=4, rule="none", workers=1))
    cli.ok("run", "s.yaml", "-s", "resources.reuse_workers=true")
    trials = cli.json("trials", "x")
    assert [one["state"] for one in trials] == ["complete", "failed", "complete", "complete"]
    assert "as the test asks for" in trials[1]["reason"]
    assert [one["attempts"] for one in trials] == [1] * 4
    processes = [(cli.directory / f"begun-{number}").read_text() for number in range(2, 5)]
    assert len(set(processes)) == 1
