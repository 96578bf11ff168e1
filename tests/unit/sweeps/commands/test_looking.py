"""The commands that only look load nothing heavy, so that they answer at once."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli import app
from tests.unit.sweeps.made_sweep import MadeSweep

COMMANDS = [
    ["list"],
    ["status", "small"],
    ["trials", "small"],
    ["show", "small", "0"],
    ["best", "small"],
    ["compare", "small"],
]
HEAVY = {"torch", "ray", "mlflow", "optuna", "sqlalchemy", "numpy", "pandas", "plotly"}


@pytest.mark.parametrize("as_json", [False, True])
def test_looking_loads_nothing_heavy(tmp_path: Path, *, as_json: bool) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete", 0.5, 0.4)
    sweep.add("failed", 0.7, reason="oom")
    lines = [[*c, "--root", str(tmp_path), *["--json"] * as_json] for c in COMMANDS]
    code = (
        "import json, sys\n"
        "from sweeps.cli import app\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    app(line, standalone_mode=False)\n"
        "    heavy = set(json.loads(sys.argv[2])) & set(sys.modules)\n"
        "    assert not heavy, f'{line} loaded {heavy}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines), json.dumps(sorted(HEAVY))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "small" in done.stdout


def test_what_is_not_finite_is_null_in_json(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete", math.nan, -math.inf, 0.3)
    sweep.add("pruned", math.inf)

    def shown(*command: str) -> dict[str, object]:
        line = [*command, "small", *["0"] * (command == ("show",)), "--json"]
        text = CliRunner().invoke(app, [*line, "--root", str(tmp_path)]).stdout
        return json.loads(text, parse_constant=pytest.fail)  # type: ignore[no-any-return]

    assert shown("show")["reports"] == {"1": None, "2": None, "3": 0.3}
    for command in ("trials", "compare", "status"):
        shown(command)
