"""The commands that look: nothing heavy is imported; the log of a trial is safe and followed."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import pytest
from rich.text import Text
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.cli.plain_console import PlainConsole
from sweeps.cli.render import _running, watch
from sweeps.sweep_lock import SweepLock
from sweeps.view import sweep_progress
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
        "small: running, 3 trials: 1 running, 2 not started",
        "small: interrupted, 3 trials: 1 waiting, 1 complete, 1 not started",
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


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path)
    number = made.add("complete", 0.5)
    made.paths.trial(number).mkdir(parents=True)
    return made


def _log(sweep: MadeSweep, number: int = 0) -> Path:
    return sweep.paths.trial(number) / "trial.log"


def _logs(sweep: MadeSweep, *words: str) -> Result:
    return CliRunner().invoke(
        app, ["show", "small", "--log", *words, "--root", str(sweep.paths.root)]
    )


def test_log_is_printed_without_control_of_the_terminal(sweep: MadeSweep) -> None:
    _log(sweep).write_bytes("plain é\n\x1b[2Jred\rback\x07\n\xff end\n".encode("latin-1"))
    done = _logs(sweep, "0")
    assert done.exit_code == 0
    assert done.stdout == "plain \ufffd\n\\x1b[2Jred\nback\\x07\n\ufffd end\n"


def test_trial_without_output_is_named(sweep: MadeSweep) -> None:
    done = _logs(sweep, "0")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "trial 0 has printed nothing; see: " in done.stderr
    assert " show small 0 " in done.stderr


def test_log_that_is_no_file_does_not_block(sweep: MadeSweep) -> None:
    os.mkfifo(_log(sweep))
    done = _logs(sweep, "0")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "trial.log" in done.stderr


def test_follow_prints_new_lines_until_the_trial_ends(
    sweep: MadeSweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = sweep.add(None)
    looked, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def sleep(_: float) -> None:
        looked.release()
        assert go_on.acquire(timeout=60)

    monkeypatch.setattr(sweep_progress.time, "sleep", sleep)
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    try:
        with ThreadPoolExecutor() as executor:
            done = executor.submit(_logs, sweep, str(number), "--follow")
            assert looked.acquire(timeout=60)  # the trial has no directory yet
            sweep.paths.trial(number).mkdir(parents=True)
            half = "é".encode()
            _log(sweep, number).write_bytes(b"one\n" + half[:1])
            go_on.release()
            assert looked.acquire(timeout=60)
            with _log(sweep, number).open("ab") as file:
                file.write(half[1:] + b"\ntwo\n")
            go_on.release()
            assert looked.acquire(timeout=60)
            with _log(sweep, number).open("ab") as file:
                file.write(b"the end\n")
            sweep.ledger.finish(number, "failed", reason="x")
            go_on.release()
            result = done.result(60)
    finally:
        lock.release()
    assert result.exit_code == 0
    assert result.stdout == "one\né\ntwo\nthe end\n"


def test_output_of_further_ranks_follows_that_of_the_first(sweep: MadeSweep) -> None:
    _log(sweep).write_text("first\n")
    for rank, text in ((10, "tenth\n"), (2, "second\n"), (3, "")):
        (sweep.paths.trial(0) / f"trial.rank{rank}.log").write_text(text)
    assert _logs(sweep, "0").stdout == "first\n[rank 2]\nsecond\n[rank 10]\ntenth\n"
