"""The words of a command line: former names, a sweep that is not named, trials, and options."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from sweeps.cli import inspect
from sweeps.cli.app import app
from sweeps.cli.console import FORMER
from sweeps.ledger.ledger import Ledger
from sweeps.sweep_lock import SweepLock
from tests.unit.sweeps.sweep_factory import MadeSweep
from tracking.outbox_status import read_outbox

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _made(name: str, *, seconds: int) -> MadeSweep:
    """A sweep with a trial, whose spec was written at a time in seconds."""
    made = MadeSweep(Path("runs").absolute(), name)
    made.add("complete", 0.5)
    os.utime(made.paths.spec, (seconds, seconds))
    return made


def _sweep(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def _refusal(*words: str) -> str:
    done = _sweep(*words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr


def test_commands_are_few_and_in_four_groups() -> None:
    seen = [command for command in COMMANDS.values() if not command.hidden]
    assert len(seen) <= 18
    groups = [command.rich_help_panel for command in seen]
    assert list(dict.fromkeys(groups)) == ["Run", "Look", "Trust", "Keep"]


@pytest.mark.parametrize("former", FORMER)
def test_former_name_is_answered_with_the_new_one(here: Path, former: str) -> None:
    said = _refusal(former, "digits", "--json")
    assert said == f"'sweep {former}' is no command any more; use: sweep {FORMER[former]}\n"
    command, *words = FORMER[former].split()
    flags = {flag for option in COMMANDS[command].params for flag in option.opts}
    assert {word for word in words if word.startswith("-")} <= flags
    assert not list(here.iterdir())


@pytest.mark.usefixtures("here")
def test_newest_sweep_is_taken_without_a_name() -> None:
    _made("newer", seconds=2000)
    alone = _sweep("status", "--json")
    assert (json.loads(alone.stdout)["name"], alone.stderr) == ("newer", "")
    _made("older", seconds=1000)
    for words in (("status", "--json"), ("audit", "--json"), ("show", "0", "--json")):
        done = _sweep(*words)
        assert done.exit_code == 0, done.output
        assert "the newest sweep" in done.stderr
        assert "newer" in done.stdout or json.loads(done.stdout)["number"] == 0


@pytest.mark.usefixtures("here")
def test_spec_of_a_new_sweep_has_a_name_by_default() -> None:
    _made("digits", seconds=1000)
    assert "run it with: sweep run digits-2.yaml" in _sweep("init", "--from", "digits").stdout


def test_no_sweep_can_be_the_newest(here: Path) -> None:
    assert f"there is no sweep below {here}/runs; without NAME" in _refusal("best")


@pytest.mark.usefixtures("here")
def test_lone_number_is_a_trial_unless_a_sweep_has_that_name() -> None:
    _made("digits", seconds=2000).add("complete", 0.25)
    assert json.loads(_sweep("best", "0", "--json").stdout)["value"] == 0.5
    assert "has no trial 7" in _refusal("show", "7")
    _made("seven", seconds=1000).paths.directory.rename("runs/7")
    assert "no TRIAL was given" in _refusal("show", "7")
    assert json.loads(_sweep("show", "7", "0", "--json").stdout)["number"] == 0


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [("digits", "1"), ("1",)])
def test_trial_to_stop_is_the_second_word_or_an_option(words: tuple[str, ...]) -> None:
    made = _made("digits", seconds=1000)
    made.add(None, 0.5)
    done = _sweep("stop", *words, "--json")
    assert done.exit_code == 0, done.output
    assert [trial.state for trial in made.view.records] == ["complete", "pruned"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("audit digits --files --test", "--test and --files exclude each other"),
        ("audit digits --test --from first", "--from has no effect without --reproduce"),
        ("audit digits 0", "TRIAL has no effect without --test or --reproduce"),
        ("doctor --trust x --forget x", "--trust and --forget exclude each other"),
        ("init -s trials=3", "-s has no effect without --from"),
        ("list digits --yes", "--yes has no effect without --remove"),
        ("resume digits 0", "TRIAL has no effect without --retry or --finish"),
        ("resume digits --retry --finish 0", "--retry and --finish exclude each other"),
        ("stop digits 0 --trial 0", "TRIAL and --trial exclude each other"),
    ],
)
def test_options_that_do_not_fit_are_refused(line: str, said: str) -> None:
    _made("digits", seconds=1000)
    assert _refusal(*line.split()).startswith(said)


@pytest.mark.usefixtures("here")
def test_report_opens_the_page_that_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(inspect.webbrowser, "open", opened.append)
    monkeypatch.setattr("sweeps.artifacts.export.report", lambda _, path: path)
    _made("digits", seconds=1000)
    assert _sweep("report").exit_code == 0
    assert not opened
    assert _sweep("report", "--open").exit_code == 0
    assert opened == [Path("digits-report.html").absolute().as_uri()]


def _stop(root: Path, number: int, *more: str) -> tuple[int, str]:
    words = ["stop", "small", "--trial", str(number), "--root", str(root), *more]
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.output


@pytest.mark.parametrize("values", [(), (0.5, 0.25)])
def test_trial_of_a_stopped_sweep_ends(tmp_path: Path, values: tuple[float, ...]) -> None:
    sweep = MadeSweep(tmp_path)
    number, other = sweep.add(None, *values), sweep.add(None)
    code, output = _stop(tmp_path, number, "--json")
    assert code == 0, output
    assert json.loads(output)["state"] == "pruned"
    record = Ledger.open(sweep.paths.ledger).trial(number)
    assert (record.state, record.reason) == ("pruned", "stopped by the user")
    assert record.value == (min(values) if values else None)
    assert not Ledger.open(sweep.paths.ledger).trial(other).finished
    assert read_outbox(sweep.paths.outbox).tracked_statuses[number] == "KILLED"
    code, output = _stop(tmp_path, number)
    assert (code, "is pruned already" in output) == (2, True)


def test_trial_is_not_stopped_while_another_holds_the_lock(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None)
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    try:  # no driver of that token looks at what is asked
        code, _ = _stop(tmp_path, number, "--timeout", "0s")
    finally:
        lock.release()
    assert code != 0
    assert not Ledger.open(sweep.paths.ledger).trial(number).finished
