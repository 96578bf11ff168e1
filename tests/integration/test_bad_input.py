"""Wrong input at the command line: a clear message, exit code 2, no traceback, nothing created."""

from __future__ import annotations

import pytest

from tests.integration.commandline import SMALL, CommandLine

WRONG = """\
name: wrong
task: digits
metric: val/loss
mode: minimize
trials: 0
learning_rte: 3
space:
  train.optimzer.lr: {loguniform: [0, 1]}
  train.optimizer.lr: {logunifrm: [1.0e-4, 1]}
"""


def _assert_refused(cli: CommandLine, message: str, *arguments: str) -> None:
    before = {path.name for path in cli.directory.iterdir()}
    done = cli(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr == message
    assert {path.name for path in cli.directory.iterdir()} == before


def test_all_errors_of_a_spec_at_once(cli: CommandLine) -> None:
    cli.write("wrong.yaml", WRONG)
    message = (
        "wrong.yaml:4:7: mode: 'minimize' is not known here; valid: min, max; "
        "did you mean 'min'?\n"
        "wrong.yaml:5:9: trials: 0 is out of range; it must be at least 1; "
        "write for example 24\n"
        "wrong.yaml:6:1: learning_rte: unknown key 'learning_rte' here; "
        "did you mean 'train.optimizer.lr'?\n"
        "wrong.yaml:8:3: space.train.optimzer.lr: 'train.optimzer.lr' names no field of the "
        "spec; did you mean 'train.optimizer.lr'?\n"
        "wrong.yaml:9:24: space.train.optimizer.lr.logunifrm: unknown distribution "
        "'logunifrm'; valid: uniform, loguniform, quniform, int, logint, choice; "
        "did you mean 'loguniform'?\n"
    )
    for command in ("check", "run", "train"):
        _assert_refused(cli, message, command, "wrong.yaml")


def test_an_ask_that_cannot_be_met_fails_instead_of_waiting(cli: CommandLine) -> None:
    cli.write("small.yaml", SMALL)
    done = cli("run", "small.yaml", "-s", "resources.cpu=4096")
    assert done.returncode == 2
    assert done.stderr.startswith("resources.cpu: 4096 CPUs are more than any node has; ")
    assert not cli.root.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["resum", "small"], "No such command 'resum'. Did you mean 'resume'?"),
        (["run", "small.yaml", "--nam", "x"], "No such option: --nam"),
        (["run"], "Missing argument"),
        (["status", "nosuch"], "there is no sweep 'nosuch' below"),
        (["resume", "nosuch"], "there are no sweeps there yet"),
        (["run", "nofile.yaml"], "nofile.yaml: there is no such file"),
        (["run", "small.yaml", "--name", "../x"], "holds a path separator"),
        (["run", "small.yaml", "-s", "trials"], "there is no '='"),
        (["show", "small", "x"], "valid integer"),
        (["best", "small", "--pickle"], "says how to register; add --register MODEL"),
    ],
)
def test_wrong_words(cli: CommandLine, arguments: list[str], said: str) -> None:
    cli.write("small.yaml", SMALL)
    done = cli(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not cli.root.exists()
