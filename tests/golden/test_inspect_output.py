"""The output of the inspecting commands as golden files: with one metric and with two.

To accept a change:  UPDATE_GOLDEN=1 python -m pytest tests/golden/test_inspect_output.py
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.sweeps.sweep_factory import MadeSweep

HERE = Path(__file__).parent
COMMANDS = [
    ["list"],
    ["status", "small"],
    ["trials", "small"],
    ["show", "small", "1"],
    ["best", "small"],
    ["best", "small", "1"],
]
LOOK = """
import json, sys
from sweeps.cli.app import app
for line in json.loads(sys.argv[1]):
    print("$ sweep", *line, flush=True)
    app([*line, "--root", sys.argv[2]], standalone_mode=False)
    print(flush=True)
"""


def _one_metric(root: Path) -> MadeSweep:
    sweep = MadeSweep(root)
    sweep.add("complete", 0.5, 0.4, 0.6)
    sweep.add("complete", 0.3)
    sweep.add("failed", 0.7, reason="oom: out of memory")
    return sweep


def _two_metrics(root: Path) -> MadeSweep:
    sweep = MadeSweep(root, metric="[val/loss, train/samples_per_second]", mode="[min, max]")
    sweep.add("complete", [0.5, 900.0], [0.4, 1000.0], [0.6, 1300.0])
    sweep.add("complete", [0.3, 800.0])
    sweep.add("complete", [0.45, 700.0])
    sweep.add("pruned", [0.2, 100.0], reason="stopped by the user")
    sweep.add("failed", reason="oom: out of memory")
    return sweep


@pytest.mark.parametrize(
    ("made", "golden"), [(_one_metric, "one-metric.txt"), (_two_metrics, "two-metrics.txt")]
)
def test_printed_output(tmp_path: Path, made: type[MadeSweep], golden: str) -> None:
    made(tmp_path)
    lines = [[*line, *more] for line in COMMANDS for more in ([], ["--json"])]
    lines.append(["compare", "small"])  # its JSON holds the whole configuration
    done = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(lines), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    text = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    text = text.replace(str(tmp_path), "ROOT") + "\n"
    text = re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d", "TIME", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    path = HERE / golden
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
