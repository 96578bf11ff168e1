"""The command line's help and the example's resolved spec, as files: a change shows in the diff.

To accept a change:  UPDATE_GOLDEN=1 python -m pytest tests/golden/test_command_line.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.spec.spec import load_with_positions

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "sweeps/examples/digits.yaml"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def _compare(name: str, text: str) -> None:
    golden = HERE / name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str) -> None:
    words = [*command.split(), "--help"]
    done = CliRunner().invoke(app, words, prog_name="sweep", env={"COLUMNS": "100"})
    assert (done.exit_code, done.stderr) == (0, "")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    _compare(f"help{'-' if command else ''}{command}.txt", "\n".join(lines) + "\n")


def test_short_help_option_equals_help() -> None:
    def shown(option: str) -> str:
        line = [Path(sys.executable).with_name("sweep"), "status", option]
        return subprocess.run(line, capture_output=True, text=True, check=True).stdout

    assert shown("-h") == shown("--help")


def test_resolved_spec_of_the_example() -> None:
    _compare("digits.resolved.yaml", load_with_positions(EXAMPLE)[0].to_yaml())


def test_help_imports_neither_torch_ray_nor_mlflow() -> None:
    code = (
        "import sys\n"
        "from sweeps.cli.app import app\n"
        "try:\n"
        "    app(['--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'ray', 'mlflow', 'optuna', 'sweeps.spec.spec'} & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
