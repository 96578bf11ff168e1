"""A command that misses what lies beside its spec says where to start it."""

from __future__ import annotations

import pytest

from tests.integration.commandline import CommandLine

TASK = """
from trainable.tasks.digits import Digits

class Mine(Digits):
    def build_data(self):
        open("samples/data.csv").read()
        return super().build_data()
"""
SPEC = """
name: small
task: mine:Mine
metric: val/loss
mode: min
trials: 1
space: {}
"""


@pytest.mark.parametrize("command", ["check", "train", "run"])
def test_directory_of_the_spec_is_named(cli: CommandLine, command: str) -> None:
    project = cli.directory / "my project"
    (project / "samples").mkdir(parents=True)
    (project / "small.yaml").write_text(SPEC)
    (project / "mine.py").write_text(TASK)
    (project / "samples/data.csv").touch()
    said = "{} is beside the spec; repeat the command after: cd 'my project'"
    done = cli(command, "my project/small.yaml")
    assert done.returncode == 2
    assert said.format("mine.py") in done.stderr
    cli.environment["PYTHONPATH"] = str(project)
    done = cli(command, "my project/small.yaml")
    assert done.returncode == 2
    assert said.format("samples/data.csv") in done.stderr
    assert not cli.root.exists()
    if command == "check":
        (project / "mine.py").write_text(TASK.replace("samples", "else"))
        assert "beside the spec" not in cli(command, "my project/small.yaml").stderr
