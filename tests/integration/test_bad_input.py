"""Invalid input to the real command: a clear message, exit code 2, no traceback, no files.

All kinds of it are in `tests/unit`, most of them through the same command line without a process.
"""

from __future__ import annotations

from tests.integration.commandline import CommandLine

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
        "'logunifrm'; valid: uniform, loguniform, quniform, int, logint, powers, choice; "
        "did you mean 'loguniform'?\n"
    )
    _assert_refused(cli, message, "run", "wrong.yaml")
