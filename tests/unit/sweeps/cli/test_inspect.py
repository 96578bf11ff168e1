"""The inspecting commands import nothing heavy and answer quickly."""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.plain_console import PlainConsole
from sweeps.cli.render import _running, watch
from sweeps.view.sweep_view import SweepView
from tests.unit.sweeps.sweep_factory import MadeSweep

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
def test_inspection_loads_nothing_heavy(tmp_path: Path, *, as_json: bool) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete", 0.5, 0.4)
    sweep.add("failed", 0.7, reason="oom")
    lines = [[*c, "--root", str(tmp_path), *["--json"] * as_json] for c in COMMANDS]
    code = (
        "import json, sys\n"
        "from sweeps.cli.app import app\n"
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


def test_non_finite_values_are_null_in_json(tmp_path: Path) -> None:
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


TOLD = [
    (["status", "a b"], "resume"),
    (["best", "both", "--export", "there"], "best"),
    (["stop", "both", "--trial", "0"], "trials"),
    (["run", "both.yaml", "--name", "a b"], "status"),
]


@pytest.mark.parametrize(("line", "told"), TOLD)
def test_printed_command_names_sweep_and_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: list[str], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / ("my runs, at a place with a name that fits on no line " + "x" * 60)
    MadeSweep(root, "a b").add(None)
    both = MadeSweep(root, "both", metric="[val/loss, val/accuracy]", mode="[min, max]")
    for values in ((0.5, 0.9), (0.4, 0.8), (0.6, 0.1)):
        both.add("complete", values)
    both.add("failed")
    (tmp_path / "both.yaml").write_text(both.spec.to_yaml())
    name = "a b" if "a b" in line else "both"
    said = CliRunner().invoke(app, [*line, "--root", str(root)]).output
    (words,) = (one for one in said.splitlines() if f"{told} {shlex.quote(name)}" in one)
    assert f" --root {shlex.quote(str(root))}" in words


def test_table_in_a_pipe_is_as_wide_as_its_content(tmp_path: Path) -> None:
    names = [f"a_parameter_with_a_long_name_{number}" for number in range(30)]
    space = ", ".join(f"task.{name}: {{uniform: [0, 1]}}" for name in names)
    MadeSweep(tmp_path, space=f"{{{space}}}").add("complete", 0.5)
    code = "import sys\nfrom sweeps.cli.app import app\napp(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "trials", "small", "--root", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0].split()[5:] == names


def test_watch_without_a_terminal_prints_changes(tmp_path: Path) -> None:
    sweep, said = MadeSweep(tmp_path), StringIO()
    views = []
    for ending, running in ((None, True), (None, True), ("complete", False)):
        if not views or ending is not None:
            sweep.add(ending, 0.5)
        views.append(SweepView(sweep.paths))
        views[-1].running = running
    watch(PlainConsole(file=said), iter(views).__next__, every=0)
    heads = [one for one in said.getvalue().splitlines() if one.startswith("small: ")]
    assert heads == [
        "small: running, 3 trials: 2 waiting, 1 running",
        "small: interrupted, 3 trials: 2 waiting, 1 complete",
    ]


class _Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_watch_fits_a_small_terminal(tmp_path: Path) -> None:
    said, views = _Terminal(), []
    sweep = MadeSweep(tmp_path)
    for number in range(30):
        sweep.add("complete", 0.5 + number)
    sweep.add(None, 0.7)
    for running in (True, False):
        views.append(SweepView(sweep.paths))
        views[-1].running = running
    terminal = {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    console = PlainConsole(file=said, _environ=terminal, color_system=None)
    shown = console.render_lines(
        _running(console, views[0], Text("small")),
        console.options,
    )
    lines = ["".join(part.text for part in line).rstrip() for line in shown]
    assert len(lines) <= 23
    (head,) = (index for index, line in enumerate(lines) if line.startswith("trial "))
    order = [line.split()[0] for line in lines[head + 1 : -1]]
    assert order[:3] == ["30", "0", "29"], "running, best, newest"
    assert lines[-1] == f"+ {31 - len(order)} more trials"
    watch(console, iter(views).__next__, every=0)
    assert "all trials: sweep trials small" in said.getvalue()


def test_status_in_json_and_watched_says_what_was_found(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    for value in (0.5, 0.4, 0.3):
        sweep.add("complete", value)
    line = ["status", "small", "--root", str(tmp_path)]
    found = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)["findings"]
    best = found["sentences"][0]
    assert best["topic"] == "best"
    assert found["resume_with"] == ["trials=6"]
    assert best["sentence"] in CliRunner().invoke(app, line).stdout
    assert best["sentence"] in CliRunner().invoke(app, [*line, "--watch"]).stdout
    sweep.add(None, 0.6)
    status = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert (status["findings"], status["audit"]) == (None, None)
