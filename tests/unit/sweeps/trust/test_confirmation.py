"""What a confirmation says to users, and what tracking receives of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.formatting import format_number
from sweeps.trust.confirm import confirmed_trial, find_confirmation
from sweeps.trust.findings import find
from sweeps.view.sweep_view import NoBest
from tests.message_parts import assert_parts
from tests.unit.sweeps.confirming_sweep import Value, found, request, run, stored
from tests.unit.sweeps.sweep_factory import MadeSweep

NOISE = (0.011, -0.004, 0.006, -0.012, 0.002)


def _clear(leader: int, seed: int) -> float:
    """Trial 0 is better than it looked, trial 1 was lucky."""
    return (0.20, 0.30, 0.40)[leader] + NOISE[seed] + 0.001 * ((leader + seed) % 3)


def _tied(leader: int, seed: int) -> float:
    return 0.3 + 0.01 * ((leader * 7 + seed * 3) % 5)


def _confirmed(root: Path, value: Value, *, mode: str = "min", **options: float) -> MadeSweep:
    made = MadeSweep(root, mode=mode)
    sign = 1 if mode == "min" else -1
    for seen in (0.3, 0.2, 0.4):
        made.add("complete", sign * seen, params={"train.optimizer.lr": seen / 10})
    request(made, **options)
    run(made, lambda leader, seed: None if (v := value(leader, seed)) is None else sign * v)
    return made


@pytest.mark.parametrize("mode", ["min", "max"])
def test_winner_probability_and_optimism_are_said(tmp_path: Path, mode: str) -> None:
    made = _confirmed(tmp_path, _clear, mode=mode)
    result = find_confirmation(made.view)
    assert result is not None
    assert result.first is not None
    assert (result.first.number, result.is_decided, result.tied) == (0, True, [])
    assert result.first.p_best is not None
    assert result.first.p_best >= 0.95
    lucky = next(one for one in result.leaders if one.number == 1)
    assert lucky.optimism == pytest.approx(0.1, abs=0.02)  # it looked better than it is
    assert result.first.optimism == pytest.approx(-0.1, abs=0.02)
    assert result.gap == pytest.approx(0.1)
    best, mean, noise, *_ = result.sentences()
    assert_parts(best, "Take trial 0", "probability", f"{result.num_runs} runs of 3 leaders")
    value = format_number(result.first.mean)
    assert mean.startswith(f"Expect val/loss {value} (")
    much = f"{100 * abs(result.first.optimism_share or 0):.2g} % worse."
    seen = format_number(0.3 if mode == "min" else -0.3)
    count = len(result.first.values)
    assert mean.endswith(f"over {count} seeds; in the search it had {seen}, {much}")
    assert_parts(noise, "standard deviation", f"{result.noise_runs} runs", "0.1 apart")


def test_leaders_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    made = _confirmed(tmp_path, _tied, seeds=3)
    result = find_confirmation(made.view)
    assert result is not None
    assert not result.is_decided
    assert len(result.tied) > 1
    assert result.first is not None
    assert_parts(
        result.sentences()[0],
        f"Take trial {result.first.number}, of which",
        "cannot be told apart",
    )


def test_better_leader_is_taken_though_another_one_is_cheaper(tmp_path: Path) -> None:
    """Two seeds each, and a deviation over seeds of 0.041 where the means are 0.28 apart."""
    values = ((1.152, 1.184), (1.484, 1.408))
    made = _confirmed(tmp_path, lambda leader, seed: values[leader][seed], top=2, seeds=2)
    result = find_confirmation(made.view)
    assert result is not None
    assert result.noise == pytest.approx(0.041, abs=5e-4)
    assert result.first is not None
    assert (result.first.number, result.is_decided, result.tied) == (0, True, [])
    assert result.cheaper is None
    assert result.sentences()[0].startswith("Take trial 0: it is the best of the leaders")
    assert confirmed_trial(made.view).number == 0


def test_cheaper_of_tied_leaders_is_named_and_not_taken(tmp_path: Path) -> None:
    values = ((0.30, 0.34), (0.31, 0.345))
    made = _confirmed(tmp_path, lambda leader, seed: values[leader][seed], top=2, seeds=2)
    result = find_confirmation(made.view)
    assert result is not None
    assert result.first is not None
    assert (result.first.number, result.cheaper, result.is_decided) == (0, 1, False)
    assert result.sentences()[1] == (
        "Trial 1 may be as good, and trains faster: 30s a run against 1m 00s."
    )


def test_better_trial_that_ended_later_asks_for_another_confirmation(tmp_path: Path) -> None:
    made = _confirmed(tmp_path, _clear)
    number = made.add("complete", 0.25, params={"train.optimizer.lr": 0.05})
    said = find_confirmation(made.view)
    assert said is not None
    assert said.newer is None  # trial 1 had 0.2
    number = made.add("complete", 0.1, params={"train.optimizer.lr": 0.06})
    said = find_confirmation(made.view)
    assert said is not None
    assert said.newer == number
    sentence = (
        f"Confirm again: trial {number} ended later, and looked better in the search than all "
        "leaders (0.1 against 0.2)."
    )
    assert said.in_one_sentence() == sentence
    topics = {one.topic: one.sentence for one in find(made.view).sentences}
    assert topics["confirmed"] == sentence
    assert _json(made, "best", "--confirmed")["confirmation"]["said"] == sentence


def test_short_runs_differ_by_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = ((0.30, 0.34), (0.31, 0.345))
    view = _confirmed(tmp_path, lambda leader, seed: values[leader][seed], top=2, seeds=2).view
    short = [replace(one, seconds=one.seconds and one.seconds / 100) for one in view.records]
    monkeypatch.setattr(view, "records", short)
    result = find_confirmation(view)
    assert result is not None
    assert sorted(one.seconds or 0.0 for one in result.tied) == pytest.approx([0.3, 0.6])
    assert result.cheaper is None


def test_failed_leader_is_never_silent(tmp_path: Path) -> None:
    made = _confirmed(tmp_path, lambda n, s: None if n == 1 else _clear(n, s), seeds=2)
    result = find_confirmation(made.view)
    assert result is not None
    assert result.leaders[-1].standing == "failed"
    assert "Trial 1 is out: its run under seed 0" in result.sentences()[-1]
    assert found(made).tags()[1]["confirm"].startswith("out: ")


def test_status_report_and_best_show_it(tmp_path: Path) -> None:
    made = _confirmed(tmp_path, _clear)
    topics = {one.topic: one.sentence for one in find(made.view).sentences}
    assert "Take trial 0: it is the best of the leaders" in topics["confirmed"]
    result = made.view.series_result
    assert result is not None
    assert result.sentences[0] == topics["confirmed"]
    assert list(result.rows[0][:2]) == ["0", "first"]
    assert len(result.rows[0]) == len(result.columns)
    best = _json(made, "best", "--confirmed")
    assert best["number"] == 0
    assert best["confirmation"]["standing"] == "first"
    assert _json(made, "best")["number"] == 1  # the search's best stays the best
    rows = _json(made, "trials")
    assert [(one["role"], one["origin"], one["seed_index"]) for one in rows[3:6]] == [
        ("confirm", 1, 0),
        ("confirm", 0, 0),
        ("confirm", 2, 0),
    ]


def _json(made: MadeSweep, *arguments: str) -> Any:
    command, *more = arguments
    words = [command, made.paths.name, *more, "--root", str(made.paths.root), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def test_confirm_shows_what_is_decided_without_a_run(tmp_path: Path) -> None:
    made = _confirmed(tmp_path, _clear)
    shown = _json(made, "confirm")
    assert (shown["winner"], shown["is_decided"]) == (0, True)
    assert len(shown["sentences"]) >= 3
    assert "_words" not in shown


def test_front_has_no_confirmed_trial_and_no_command_for_one(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, metric="[val/loss, val/accuracy]", mode="[min, max]")
    with pytest.raises(NoBest, match=r"2 metrics.*sweep best"):
        confirmed_trial(made.view)


def test_unfinished_confirmation_has_no_winner_and_is_left_to_do(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path)
    for seen in (0.3, 0.2, 0.4):
        made.add("complete", seen, params={"train.optimizer.lr": seen / 10})
    assert made.view.state == "finished"
    with pytest.raises(NoBest, match="sweep confirm"):
        confirmed_trial(made.view)
    request(made, top=2)
    assert (made.view.state, made.view.num_left, made.view.num_trials) == ("interrupted", 2, 5)
    run(made, _clear, most=1)
    with pytest.raises(NoBest, match="has not ended"):
        confirmed_trial(made.view)
    assert stored(made.ledger).tags(made.ledger.trials()) == {}
    run(made, _clear)
    assert made.view.state == "finished"
    assert confirmed_trial(made.view).number == 0


def test_tracking_gets_numbers_by_leader(tmp_path: Path) -> None:
    made = _confirmed(tmp_path, _clear)
    state = found(made)
    series, trials = stored(made.ledger), made.ledger.trials()
    tags = series.tags(trials)
    assert tags[None] == {"confirmed_trial": "0"}
    rows = series.rows(trials)
    assert rows.keys() == {0, 1, 2}
    assert rows[0].metrics["confirm/num_seeds"] == len(state.values[0])
    assert rows[0].metrics["confirm/p_best"] >= 0.95
    assert {row.step for row in rows.values()} == {max(map(max, state.trials.values()))}
