"""Cases of `tests/cases` that hang or limit their own process: only that trial fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integration.commandline import CommandLine

pytestmark = pytest.mark.usefixtures("store")

ROGUE = Path(__file__).parents[1] / "cases/21-rogue-tasks"


def _rogue(cli: CommandLine, *modes: str, more: str = "") -> None:
    """Put the case beside the command line, with these modes, all trained at once."""
    shutil.copytree(ROGUE, cli.directory, dirs_exist_ok=True)
    text = (ROGUE / "g.yaml").read_text()
    text = text.replace("[chdir_gone, ok, ok2, ok3]", f"[{', '.join(modes)}]")
    text = text.replace("trials: 4", f"trials: {len(modes)}")
    text = text.replace("concurrency: 1", f"concurrency: {len(modes)}")
    cli.write("g.yaml", text + more)


@pytest.mark.chaos
def test_trial_that_limits_itself_fails_alone(cli: CommandLine) -> None:
    _rogue(cli, "rlimit", "hang", "ok", more="failures: {step_timeout: 5s}\n")
    done = cli("run", "g.yaml")
    assert done.returncode == 0, done.stderr
    by_mode = {one["params"]["task.mode"]: one for one in cli.json("trials", "g")}
    assert by_mode["ok"]["state"] == "complete"
    assert by_mode["rlimit"]["state"] == "failed"
    assert "File too large" in by_mode["rlimit"]["reason"]
    assert "free space" not in by_mode["rlimit"]["reason"]
    hung = by_mode["hang"]
    assert hung["state"] == "failed"
    assert hung["reason"].startswith("hang: no progress for")
    log = cli.root / f"g/trials/{hung['number']:04d}/trial.log"
    assert "in misbehave" in log.read_text()
