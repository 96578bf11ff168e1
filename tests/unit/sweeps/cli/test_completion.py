"""Shell completion: names of sweeps and numbers of trials, without slow imports or messages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.unit.sweeps.sweep_factory import MadeSweep


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


def _asked(line: str) -> dict[str, str]:
    """What the script that Typer writes for Bash asks with, at the end of a command line."""
    words = line.split(" ")
    return {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_SWEEP_COMPLETE": "complete_bash",
    }


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sweep sho", ["show"]),
        ("sweep show ", ["digits", "wide"]),
        ("sweep status --root other ", ["deep"]),
        ("sweep compare digits ", ["wide"]),
        ("sweep stop wide --trial ", ["0"]),
        ("sweep show ../other/deep ", []),
        ("sweep show missing ", []),
    ],
)
def test_tab_offers(
    sweeps: Path, monkeypatch: pytest.MonkeyPatch, line: str, offered: list[str]
) -> None:
    monkeypatch.chdir(sweeps)
    done = CliRunner().invoke(app, [], prog_name="sweep", env=_asked(line))
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_completion_imports_nothing_slow(sweeps: Path) -> None:
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=sweeps,
        capture_output=True,
        text=True,
        env={**os.environ, **_asked("sweep show digits 1")},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["1", "10", "11"]
