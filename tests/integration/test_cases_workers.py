"""Cases of `tests/cases` that damage or end their process."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine

pytestmark = pytest.mark.usefixtures("store")

CASE = Path(__file__).parents[1] / "cases" / "21-rogue-tasks"


def _with_modes(cli: CommandLine, *modes: str) -> None:
    shutil.copytree(CASE, cli.directory, dirs_exist_ok=True)
    spec = (CASE / "g.yaml").read_text()
    spec = re.sub(r"choice: \[.*\]", f"choice: [{', '.join(modes)}]", spec)
    spec = spec.replace("sampler: grid", "sampler: grid, try_first: []")
    cli.write("g.yaml", spec.replace("trials: 4", f"trials: {len(modes)}"))


@pytest.mark.chaos
def test_leftovers_of_a_task_do_not_reach_next_trial(cli: CommandLine) -> None:
    """Among them that the working directory is gone."""
    harmful = ("chdir_gone", "umask", "close1", "threads", "fork", "stdoutgone", "sig")
    _with_modes(cli, *harmful, "ok")
    cli.ok("run", "g.yaml")
    trials = cli.json("trials", "g")
    assert [(one["state"], one["attempts"]) for one in trials] == [("complete", 1)] * 8


@pytest.mark.chaos
def test_worker_death_has_a_reason(cli: CommandLine) -> None:
    _with_modes(cli, "kbd", "base", "exit0", "segv", "print", "ok")
    done = cli("run", "g.yaml", "-s", "task.at=3")
    assert done.returncode == 0
    assert "raylet" not in done.stdout + done.stderr
    trials = cli.json("trials", "g")
    logs = [(cli.root / f"g/trials/{number:04d}/trial.log").read_text() for number in range(6)]
    reasons = [one["reason"] for one in trials]
    lost = "lost: its process ended 3 times in a row without a new checkpoint; it ended"
    assert reasons[0].startswith("task: KeyboardInterrupt was raised at ")
    assert reasons[1].startswith("task: BaseException (base) was raised at ")
    assert reasons[2:4] == [
        f"{lost} with exit status 0",
        f"{lost} by signal 11 (SIGSEGV)",
    ]
    assert [one["state"] for one in trials[4:]] == ["complete"] * 2
    assert 'in misbehave\n    if m == "kbd"' in logs[0]
    assert "the trial's process ended with exit status 0" in logs[2]
    assert 'rogue.py", line 40 in misbehave' in logs[3], "faulthandler's stack"
    assert "bytes were cut here" in logs[4]
    assert len(logs[4]) <= 10 << 20


def test_case_22_each_trial_begins_with_the_globals_as_imported(cli: CommandLine) -> None:
    shutil.copytree(CASE.with_name("22-globals"), cli.directory, dirs_exist_ok=True)
    cli.ok("run", "sweep.yaml")
    curves = [curve.read_text() for curve in cli.root.glob("x/trials/*/metrics.jsonl")]
    firsts = [json.loads(curve.splitlines()[0])["metrics"] for curve in curves]
    assert [(one["calls"], one["history"], one["w"]) for one in firsts] == [
        (1, 1, pytest.approx(1 / 30))
    ] * 4
