"""Shell completion: names of sweeps and numbers of trials, without slow imports or messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sweeps.sweep_factory import MadeSweep

SWEEP = Path(sys.executable).with_name("sweep")
PRESS_TAB = """
source <(sweep --show-completion bash)
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_sweep_completion sweep
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with two sweeps in `runs`, one elsewhere, and one half-removed."""
    for root, name, count in (("runs", "digits", 12), ("runs", "wide", 1), ("other", "deep", 2)):
        made = MadeSweep(tmp_path / root, name)
        for number in range(count):
            made.paths.trial(number).mkdir(parents=True)
    gone = MadeSweep(tmp_path / "runs", "gone")
    gone.paths.removed.root.mkdir()
    gone.paths.directory.rename(gone.paths.removed.directory)
    (tmp_path / "runs/mlartifacts").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _tab(*words: str) -> list[str]:
    """What Bash offers at the end of a command line whose last word is not complete."""
    search = f"{SWEEP.parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", "sweep", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": search},
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["sho"], ["show"]),
        (["show", ""], ["digits", "wide"]),
        (["rm", "d"], ["digits"]),
        (["status", "--root", "other", ""], ["deep"]),
        (["status", "--root", "/nowhere", ""], []),
        (["compare", "digits", ""], ["wide"]),
        (["show", "digits", "1"], ["1", "10", "11"]),
        (["diff", "wide", "0", ""], ["0"]),
        (["stop", "wide", "--trial", ""], ["0"]),
        (["best", "--root", "other", "deep", "--trial", ""], ["0", "1"]),
        (["show", "../other/deep", ""], []),
        (["show", "missing", ""], []),
    ],
    ids=" ".join,
)
def test_tab_offers(words: list[str], offered: list[str]) -> None:
    assert _tab(*words) == offered


@pytest.mark.usefixtures("here")
def test_completion_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from sweeps.cli import app\n"
        "sys.argv = ['sweep']\n"
        "try:\n"
        "    app(prog_name='sweep')\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'sqlalchemy'} & {*sys.modules}\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    variables = {"COMP_WORDS": "sweep show digits 1", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **variables, "_SWEEP_COMPLETE": "complete_bash"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["1", "10", "11"]
