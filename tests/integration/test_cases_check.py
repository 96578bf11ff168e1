"""Cases of `tests/cases` about what is known of a task before it trains."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.integration.commandline import CommandLine

CASES = Path(__file__).parents[1] / "cases"


def test_case_23_check_calls_methods_in_the_order_of_a_run(cli: CommandLine) -> None:
    shutil.copytree(CASES / "23-plateau", cli.directory, dirs_exist_ok=True)
    done = cli("check", "sweep.yaml", "-s", "search.try_first=[]")
    assert done.returncode == 0
    assert "AttributeError" not in done.stdout + done.stderr
    assert "s an epoch" in done.stdout
    assert "unknown" not in done.stdout


def test_case_31_parameters_that_no_optimizer_has_are_refused(cli: CommandLine) -> None:
    shutil.copytree(CASES / "31-loss-parameters-on-task", cli.directory, dirs_exist_ok=True)
    for command in ("check", "run"):
        done = cli(command, "sweep.yaml")
        assert done.returncode == 2
        assert "self.center.w" in done.stderr
        assert "self.center.c" in done.stderr
        assert "in no optimizer" in done.stderr
    assert not cli.root.exists()
    line = done.stderr.partition("write `")[2].partition("`")[0]
    task = cli.directory / "t.py"
    task.write_text(f"{task.read_text()}    {line}\n")
    assert "is valid" in cli.ok("check", "sweep.yaml")
