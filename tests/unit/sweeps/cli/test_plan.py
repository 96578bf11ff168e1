"""The plan of `sweep check`: what it shows, what hours buy, and the spec that it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.engine.task_check import TaskFacts, TaskInspector
from sweeps.spec.spec import load_with_positions

SPEC = """\
# What is the best rate?
name: small
task: digits
metric: val/loss
mode: min
trials: 6   # a few
budget: {epochs: 9}
concurrency: 2
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
early_stopping: {scheduler: asha, reduction: 3}
"""
FACTS: dict[str, Any] = {
    "steps_per_report": 10,
    "step_seconds": 1.0,
    "evaluation_seconds": 2.0,
    "checkpoint_bytes": 2**20,
    "process_bytes": 2**30,
}
Plan = Callable[..., Result]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Run `sweep check` with a task whose steps take a second; nothing else may be created."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SPEC)

    def run(*options: str, facts: dict[str, Any] | None = None, new: tuple[str, ...] = ()) -> Any:
        found = TaskFacts(**(FACTS | (facts or {})))
        monkeypatch.setattr(TaskInspector, "__init__", lambda *_, **__: None)
        monkeypatch.setattr(TaskInspector, "facts", lambda _: found)
        done = CliRunner().invoke(app, ["check", "s.yaml", *options])
        assert {path.name for path in tmp_path.iterdir()} == {"s.yaml", *new}
        return done

    return run


def _json(done: Result) -> Any:
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_spec_is_planned_with_its_own_trials(plan: Plan) -> None:
    found = _json(plan("--json"))
    assert (found["plan"]["trials"], found["plan"]["max_epochs"]) == (6, 54)
    assert found["plan"]["epoch_seconds"] == pytest.approx(12, rel=0.01)
    own, two, four, none = found["options"]
    assert (own["overrides"], own["rungs"]) == ({}, [1, 3])
    assert two["overrides"] == {"early_stopping.reduction": 2}
    assert (two["rungs"], four["rungs"]) == ([1, 2, 4], [1, 4])
    assert none["overrides"] == {"early_stopping.scheduler": "none"}
    assert own["expected_epochs"] < none["expected_epochs"] == 54
    assert found["written"] is None


def test_hours_buy_as_many_trials_as_fit(plan: Plan) -> None:
    for hours in (0.1, 2):
        options = _json(plan("--json", "--hours", str(hours)))["options"]
        for one in options:
            assert 0.85 * hours <= one["hours"] <= hours
        own, *_, none = options
        assert none["trials"] < own["trials"]
    longest = 6 * 9 * 12 / 3600  # of six trials, one after the other
    assert own["trials"] > 6 * 2 / longest


def test_few_hours_buy_no_trial(plan: Plan) -> None:
    done = plan("--hours", "0.01")
    assert done.exit_code == 2
    assert "buys no trial: one to its end takes about 1m" in done.stderr
    assert "shorten the budget" in done.stderr


def test_grid_is_never_larger_than_its_points(plan: Plan) -> None:
    grid = (
        *("-s", "search.sampler=grid"),
        *("-s", "space.train.optimizer.lr={choice: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]}"),
    )
    assert _json(plan("--json", "--hours", "50", *grid))["plan"]["trials"] == 7
    assert _json(plan("--json", "-s", "trials=8", *grid))["plan"]["trials"] == 7


def test_written_spec_has_the_trials_and_the_comments(plan: Plan, tmp_path: Path) -> None:
    done = plan("--hours", "2", "--write", "new.yaml", "--json", new=("new.yaml",))
    trials = _json(done)["plan"]["trials"]
    text = (tmp_path / "new.yaml").read_text()
    assert text == SPEC.replace("trials: 6   # a few", f"{f'trials: {trials}':<12}# a few")


def test_written_spec_has_the_overrides(plan: Plan, tmp_path: Path) -> None:
    simple = ("-s", "early_stopping.reduction=2")
    plan("--write", "a.yaml", *simple, new=("a.yaml",))
    assert "# What is the best rate?" in (tmp_path / "a.yaml").read_text()
    nested = ("-s", "space.train.batch_size={choice: [8, 16]}")
    plan("--write", "b.yaml", *simple, *nested, new=("a.yaml", "b.yaml"))
    for name, settings in (("a.yaml", simple), ("b.yaml", (*simple, *nested))):
        written = load_with_positions(tmp_path / name)[0]
        assert written == load_with_positions(tmp_path / "s.yaml", settings[1::2])[0]


@pytest.mark.parametrize("asked", [("-s", "trials=60"), ("--hours", "2")])
def test_auto_chooses_by_the_planned_number_of_trials(
    plan: Plan, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    """Two trials need no sampler that learns; sixty do."""
    settings = ("trials=2", "search=auto", "early_stopping=auto")
    options = [part for one in settings for part in ("-s", one)]
    done = plan(*options, *asked, "--write", "new.yaml", new=("new.yaml",))
    assert done.exit_code == 0, done.output
    written = load_with_positions(tmp_path / "new.yaml")[0]
    assert written.trials > written.search.startup_trials
    chosen = (written.search.sampler, written.early_stopping.scheduler)
    assert chosen == ("tpe", "asha_promote")
    assert "auto takes sampler tpe" in done.stdout
    assert "asha_promote (this spec)" in done.stdout
    assert (
        written
        == load_with_positions(tmp_path / "s.yaml", [*settings, f"trials={written.trials}"])[0]
    )


@pytest.mark.parametrize("asked", [(), ("--hours", "2")])
def test_seeds_of_a_configuration_are_no_trials_of_the_spec(
    plan: Plan, tmp_path: Path, asked: tuple[str, ...]
) -> None:
    options = ("-s", "repeats=3", "-s", "search={sampler: auto}")
    done = plan(*options, *asked, "--json", "--write", "new.yaml", new=("new.yaml",))
    written = load_with_positions(tmp_path / "new.yaml")[0]
    assert _json(done)["plan"]["trials"] == 3 * written.trials
    if "--hours" in asked:
        assert 1.7 <= _json(done)["plan"]["hours"] <= 2
    else:
        assert written.trials == 6


def test_existing_file_is_never_overwritten(plan: Plan, tmp_path: Path) -> None:
    done = plan("--write", "s.yaml")
    assert done.exit_code == 2
    assert "s.yaml exists already" in done.stderr
    assert (tmp_path / "s.yaml").read_text() == SPEC


@pytest.mark.parametrize("hours", ["0", "nan", "a day"])
def test_wrong_hours_are_refused(plan: Plan, hours: str) -> None:
    done = plan("--hours", hours)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--hours" in done.stderr


def test_text_says_what_is_simulated(plan: Plan) -> None:
    shown = plan("--hours", "1").stdout
    assert "invented curves" in shown
    assert "what 1 hour buys" in shown
    assert "reduction 4" in shown
    assert "nothing is stopped" in shown
