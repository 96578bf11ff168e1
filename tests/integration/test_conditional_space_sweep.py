"""A sweep with a conditional, constrained space through the real command line: initial points, an
edited space on resume, and every inspecting command.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.commandline import TINY, CommandLine

pytestmark = pytest.mark.usefixtures("store")

MOMENTUM, NAME, RATE = "train.optimizer.momentum", "train.optimizer.name", "train.optimizer.lr"
SPACE = """
space:
  train.optimizer.name: {choice: [sgd, adamw]}
  train.optimizer.momentum: {uniform: [0.5, 0.9], when: {train.optimizer.name: sgd}}
  train.optimizer.lr: {loguniform: [1.0e-3, 1.0e-1]}
  train.clip.max_norm: {uniform: [0.5, 5]}
search:
  startup_trials: 2
  try_first:
    - {train.optimizer.name: sgd, train.optimizer.momentum: 0.75}
    - {train.optimizer.name: adamw, train.optimizer.lr: 0.01}
  constraints: [train.optimizer.lr * train.clip.max_norm < 0.2]
"""
TEXT = re.sub(r"space:\n(  .*\n)+search: .*\n", SPACE.lstrip(), TINY)


@pytest.mark.chaos  # three sweeps; each part of it is tested without any, too
def test_conditional_space_is_searched_edited_and_resumed(cli: CommandLine) -> None:
    cli.write("small.yaml", TEXT)
    cli.ok("run", "small.yaml", "-s", "trials=3")
    first = cli.json("trials", "small")
    assert [one["params"][NAME] for one in first[:2]] == ["sgd", "adamw"]
    assert first[0]["params"][MOMENTUM] == 0.75
    assert first[1]["params"][RATE] == 0.01
    edited = cli(
        "resume", "small", "-s", "trials=5", "-s", "space.task.width={choice: [16, 32]}",
        "-s", "space.train.optimizer.name={choice: [sgd, adam, adamw]}",
    )  # fmt: skip
    assert edited.returncode == 0, edited.stderr
    assert edited.stderr.startswith(
        "changed: trials: 3 -> 5, "
        "space.train.optimizer.name.choice: [sgd, adamw] -> [sgd, adam, adamw], "
        "space.task.width.choice: nothing -> [16, 32]\n"
    )
    found = cli.json("trials", "small")
    assert [one["params"] for one in found[:3]] == [one["params"] for one in first]
    for one in found[3:]:
        always = {NAME, RATE, "train.clip.max_norm", "task.width"}
        assert one["params"].keys() - {MOMENTUM} == always
        assert (MOMENTUM in one["params"]) is (one["params"][NAME] == "sgd")
    for one in found:
        params: dict[str, Any] = one["params"]
        assert params[RATE] * params["train.clip.max_norm"] < 0.2
        assert one["state"] == "complete"
    for command in (["status"], ["trials"], ["show", "small", "1"], ["compare"], ["report"]):
        cli.ok(command[0], *(command[1:] or ["small"]))
    _check_tracked(cli, found)
    refused = cli("resume", "small", "-s", "search.try_first=[]")
    assert (refused.returncode, "5 trials have been drawn" in refused.stderr) == (2, True)
    learning = cli("run", "small.yaml", "--name", "new", "-s", "search.warm_start=[smal]")
    assert (learning.returncode, "no such sweep" in learning.stderr) == (2, True)
    assert not (cli.root / "new").exists()
    told = cli(
        "run", "small.yaml", "--name", "new", "-s", "search.warm_start=small", "-s", "trials=2"
    )
    assert told.returncode == 0, told.stderr
    inside = sum(one["params"][NAME] != "adam" for one in found)
    assert f"warm start from {inside} trials of 'small'" in " ".join(told.stderr.split())
    assert len(cli.json("trials", "new")) == 2


def _check_tracked(cli: CommandLine, found: list[dict[str, Any]]) -> None:
    client = MlflowClient(f"sqlite:///{cli.root / 'mlflow.db'}")
    for one in found:
        recorded = client.get_run(one["mlflow_run_id"]).data.params
        assert {
            key: str(value) for key, value in one["params"].items()
        }.items() <= recorded.items()
