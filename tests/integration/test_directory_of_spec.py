"""A command that misses what lies beside its spec says where to start it."""

from __future__ import annotations

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


def test_directory_of_the_spec_is_named(cli: CommandLine) -> None:
    project = cli.directory / "my project"
    (project / "samples").mkdir(parents=True)
    (project / "small.yaml").write_text(SPEC)
    (project / "mine.py").write_text(TASK)
    (project / "samples/data.csv").touch()
    said = "{} is beside the spec; repeat the command after: cd 'my project'"
    for command in ("check", "train", "run"):
        done = cli(command, "my project/small.yaml")
        assert done.returncode == 2
        assert said.format("mine.py") in done.stderr
    cli.environment["PYTHONPATH"] = str(project)
    done = cli("run", "my project/small.yaml")
    assert done.returncode == 2
    assert said.format("samples/data.csv") in done.stderr
    assert not cli.root.exists()
    (project / "mine.py").write_text(TASK.replace("samples", "else"))
    assert "beside the spec" not in cli("check", "my project/small.yaml").stderr
