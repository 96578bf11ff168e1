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
source "$1"
shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_sweep_completion sweep
printf '%s\\n' "${COMPREPLY[@]}"
"""


SEARCH = f"{SWEEP.parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with two sweeps in `runs`, one elsewhere, and one half-removed."""
    directory = tmp_path_factory.mktemp("here")
    for root, name, count in (("runs", "digits", 12), ("runs", "wide", 1), ("other", "deep", 2)):
        made = MadeSweep(directory / root, name)
        for number in range(count):
            made.paths.trial(number).mkdir(parents=True)
    gone = MadeSweep(directory / "runs", "gone")
    gone.paths.removed.root.mkdir()
    gone.paths.directory.rename(gone.paths.removed.directory)
    (directory / "runs/mlartifacts").mkdir()
    return directory


@pytest.fixture
def here(sweeps: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(sweeps)
    return sweeps


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a shell reads at its start."""
    path = tmp_path_factory.mktemp("script") / "completion.bash"
    # Typer writes for the shell that started it, here one that waits for its end.
    command = '"$0" --show-completion bash; exit $?'
    shown = subprocess.run(["bash", "-c", command, SWEEP], capture_output=True, check=True)
    path.write_bytes(shown.stdout)
    return path


def _tab(script: Path, *words: str) -> list[str]:
    """What Bash offers at the end of a command line whose last word is not complete."""
    done = subprocess.run(
        ["bash", "-c", PRESS_TAB, "bash", script, "sweep", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": SEARCH},
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
        (["audit", "d"], ["digits"]),
        (["status", "--root", "other", ""], ["deep"]),
        (["status", "--root", "/nowhere", ""], []),
        (["compare", "digits", ""], ["wide"]),
        (["show", "digits", "1"], ["1", "10", "11"]),
        (["show", "wide", "0", "--diff", ""], ["0"]),
        (["stop", "wide", "--trial", ""], ["0"]),
        (["best", "--root", "other", "deep", ""], ["0", "1"]),
        (["show", "../other/deep", ""], []),
        (["show", "missing", ""], []),
    ],
    ids=" ".join,
)
def test_tab_offers(script: Path, words: list[str], offered: list[str]) -> None:
    assert _tab(script, *words) == offered


@pytest.mark.usefixtures("here")
def test_completion_imports_nothing_slow() -> None:
    code = (
        "import sys\n"
        "from sweeps.cli.app import app\n"
        "sys.argv = ['sweep']\n"
        "try:\n"
        "    app(prog_name='sweep')\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'sqlalchemy', 'sweeps.spec.spec'}\n"
        "heavy &= {*sys.modules}\n"
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
