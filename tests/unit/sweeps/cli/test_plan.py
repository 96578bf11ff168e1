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


def test_measures_steps_with_the_optimizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yaml").write_text(SPEC)
    found = _json(CliRunner().invoke(app, ["check", "s.yaml", "--json"]))
    assert 0 < found["task"]["step_seconds"] < 1
    assert found["task"]["build_seconds"] > 0
    assert found["plan"]["expected_steps"] > 6 * 23
    assert [path.name for path in tmp_path.iterdir()] == ["s.yaml"]


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


def test_priors_stand_below_the_plan(plan: Plan) -> None:
    setting = ("-s", "space.train.optimizer.lr={loguniform: [1.0e-4, 0.1], prior: 3.0e-3}")
    (prior,) = _json(plan("--json", *setting))["priors"]
    assert (prior["key"], prior["value"]) == ("train.optimizer.lr", 3e-3)
    assert "priors    train.optimizer.lr 0.003 (width 0.1)\n" in plan(*setting).stdout


def test_another_number_of_trials_is_planned(plan: Plan) -> None:
    found = _json(plan("--json", "-s", "trials=40"))
    assert [one["trials"] for one in found["options"]] == [40] * 4
    assert found["plan"]["disk_bytes"] == 40 * 3 * 2**20


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


def test_hours_need_a_measured_step(plan: Plan) -> None:
    unknown = {"own_loop": True, "step_seconds": None, "steps_per_report": 0}
    done = plan("--hours", "1", facts=unknown)
    assert done.exit_code == 2
    assert "no step of task 'digits' was measured" in done.stderr
    assert plan("-s", "trials=9", facts=unknown).exit_code == 0


def test_grid_is_never_larger_than_its_points(plan: Plan) -> None:
    grid = (
        *("-s", "search.sampler=grid"),
        *("-s", "space.train.optimizer.lr={choice: [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]}"),
    )
    assert _json(plan("--json", "--hours", "50", *grid))["plan"]["trials"] == 7
    assert _json(plan("--json", "-s", "trials=8", *grid))["plan"]["trials"] == 7


def test_population_keeps_its_size(plan: Plan) -> None:
    (only,) = _json(plan("--json", "-s", "early_stopping={scheduler: pbt}", "--hours", "9"))[
        "options"
    ]
    assert only["trials"] == 6


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
@pytest.mark.parametrize("trials", [1, 2])
def test_auto_chooses_by_the_planned_number_of_trials(
    plan: Plan, tmp_path: Path, trials: int, asked: tuple[str, ...]
) -> None:
    """One trial needs no stopping rule, and two no sampler that learns; sixty do."""
    settings = (f"trials={trials}", "search=auto", "early_stopping=auto")
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


@pytest.mark.parametrize("asked", [(), ("-s", "trials=6"), ("--hours", "2")])
@pytest.mark.parametrize("choice", ["tpe", "auto"])
def test_seeds_of_a_configuration_are_no_trials_of_the_spec(
    plan: Plan, tmp_path: Path, choice: str, asked: tuple[str, ...]
) -> None:
    options = ("-s", "repeats=3", "-s", f"search={{sampler: {choice}}}")
    done = plan(*options, *asked, "--json", "--write", "new.yaml", new=("new.yaml",))
    written = load_with_positions(tmp_path / "new.yaml")[0]
    assert _json(done)["plan"]["trials"] == 3 * written.trials
    if "--hours" in asked:
        assert 1.7 <= _json(done)["plan"]["hours"] <= 2
    else:
        assert written.trials == 6


def test_auto_chooses_as_the_check_of_a_small_space_does(plan: Plan) -> None:
    few = "space={train.optimizer.lr: {choice: [0.1, 0.2]}}"
    done = plan("-s", "search=auto", "-s", "trials=100", "-s", few)
    assert "auto takes sampler random, as tpe would draw all 2 trials at random" in " ".join(
        done.stdout.split()
    )


def test_json_says_what_auto_takes_for_the_planned_number_of_trials(plan: Plan) -> None:
    options = ("--json", "-s", "search=auto", "-s", "trials=2")
    for asked, taken in (((), "random"), (("--hours", "2"), "tpe"), (("-s", "trials=60"), "tpe")):
        (found,) = _json(plan(*options, *asked))["auto"]
        assert (found["key"], found["taken"]) == ("search.sampler", taken)
        assert found["why"].startswith("as ")
    assert _json(plan("--json"))["auto"] == []


def test_existing_file_is_never_overwritten(plan: Plan, tmp_path: Path) -> None:
    done = plan("--write", "s.yaml")
    assert done.exit_code == 2
    assert "s.yaml exists already" in done.stderr
    assert (tmp_path / "s.yaml").read_text() == SPEC


@pytest.mark.parametrize(
    "options",
    [
        ("--hours", "0"),
        ("--hours", "nan"),
        ("--hours", "a day"),
    ],
)
def test_wrong_options_are_refused(plan: Plan, options: tuple[str, ...]) -> None:
    done = plan(*options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--hours" in done.stderr


def test_text_says_what_is_simulated(plan: Plan) -> None:
    shown = plan("--hours", "1").stdout
    assert "invented curves" in shown
    assert "what 1 hour buys" in shown
    assert "reduction 4" in shown
    assert "nothing is stopped" in shown
