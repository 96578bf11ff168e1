"""No attempt of a trial meets what another one has changed in its process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine

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


@pytest.mark.chaos  # in CI: `test_case_22_each_trial_begins_with_the_globals_as_imported`
@pytest.mark.parametrize(
    ("rule", "workers"),
    [("none", 1), ("asha_promote", 1), ("pbt", 1), ("none", 2)],
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
