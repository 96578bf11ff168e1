"""Which trials a confirmation needs, by the request and the ledger alone; and what it says."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.cli.trust import shown
from sweeps.errors import OriginChanged, UserError
from sweeps.formatting import format_number
from sweeps.reconcile.extra_training import SeriesAdder
from sweeps.trust.confirm import ConfirmLeaders, confirmed_trial, find_confirmation, find_leaders
from sweeps.trust.findings import find
from sweeps.view.sweep_view import NoBest
from tests.message_parts import assert_parts
from tests.specs import with_overrides
from tests.unit.sweeps.confirming_sweep import Value, add, end, found, request, run, stored
from tests.unit.sweeps.sweep_factory import MadeSweep

NOISE = (0.011, -0.004, 0.006, -0.012, 0.002)


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    """Trial 1 looks best, then 0, 2 and 3."""
    return _made(tmp_path)


def _made(root: Path) -> MadeSweep:
    sweep = MadeSweep(root)
    for value in (0.3, 0.2, 0.4, 0.5):
        sweep.add("complete", value, params={"train.optimizer.lr": value / 10})
    return sweep


def _value(leader: int, seed: int) -> float:
    """Trial 0 is better than it looked, trial 1 was lucky; seeds shift all alike."""
    return (0.20, 0.30, 0.40, 0.9)[leader] + NOISE[seed] + 0.001 * ((leader + seed) % 3)


def _tied(leader: int, seed: int) -> float:
    return 0.3 + 0.01 * ((leader * 7 + seed * 3) % 5)


def test_all_leaders_run_under_a_seed_before_the_next(made: MadeSweep) -> None:
    request(made, top=3, seeds=3, until=0.99)
    runs = run(made, _tied)
    assert runs[:6] == [*itertools.product((1, 0, 2), [0]), *itertools.product((1, 0, 2), [1])]
    assert add(made) == []
    assert found(made).has_ended


def test_race_drops_losers_and_ends_when_decided(made: MadeSweep) -> None:
    request(made, top=4, seeds=5)
    runs = run(made, _value)
    state = found(made)
    assert state.winner == 0
    assert 3 in state.dropped
    assert state.race is not None
    assert state.race.decided
    assert len(runs) < 4 * 5
    assert state.num_runs == len(runs)


def test_killed_driver_changes_no_decision(made: MadeSweep, tmp_path: Path) -> None:
    """Runs end one by one under new drivers, or all of a seed in reverse under one."""
    other = _made(tmp_path / "other")
    for sweep in (made, other):
        request(sweep, top=4, seeds=5)
    run(made, _value)
    while waiting := add(other):
        for trial in reversed(waiting):
            end(other, trial, _value)
    one, two = found(made), found(other)
    assert (one.values, one.dropped, one.winner) == (two.values, two.dropped, two.winner)


def test_interrupted_confirmation_goes_on_as_it_was(made: MadeSweep) -> None:
    first = request(made, top=3, seeds=4, until=0.99)
    run(made, lambda leader, seed: None if leader == 2 else _tied(leader, seed), most=4)
    assert 2 in found(made).failed
    assert request(made) == first
    assert 2 in found(made).failed  # not tried again


def test_failed_run_puts_its_leader_out_and_is_tried_again_when_asked(made: MadeSweep) -> None:
    request(made, top=3, seeds=2)
    run(made, lambda leader, seed: None if (leader, seed) == (0, 1) else _tied(leader, seed))
    state = found(made)
    assert state.has_ended
    assert "ValueError: x" in state.failed[0]
    assert state.winner in (1, 2)
    request(made)
    assert run(made, _tied) == [(0, 1)]  # the runs that succeeded are kept
    assert not found(made).failed


def test_sole_survivor_trains_twice(made: MadeSweep) -> None:
    """One value has no spread. After two, nobody is left to race against."""
    request(made, top=3, seeds=4)
    runs = run(made, lambda leader, seed: _tied(leader, seed) if leader == 0 else None)
    assert runs == [(1, 0), (0, 0), (2, 0), (0, 1)]
    assert (found(made).winner, found(made).num_runs) == (0, 2)


def test_all_failed_leaves_no_winner(made: MadeSweep) -> None:
    request(made, top=2)
    assert len(run(made, lambda *_: None)) == 2
    state = found(made)
    assert (state.has_ended, state.winner) == (True, None)


def test_more_seeds_keep_the_runs_so_far(made: MadeSweep) -> None:
    request(made, top=2, seeds=2, until=0.99)
    assert len(run(made, _tied)) == 4
    request(made, seeds=3)
    assert run(made, _tied) == [(1, 2), (0, 2)]


def test_new_request_ends_runs_that_it_does_not_need(made: MadeSweep) -> None:
    request(made, top=3)
    waiting = [trial.number for trial in add(made)]
    request(made, top=2)
    states = [made.ledger.trial(number).state for number in waiting]
    assert states == ["running", "running", "pruned"]
    assert len(run(made, _value)) >= 2
    assert not found(made).failed


def test_decided_confirmation_is_not_followed_any_more(made: MadeSweep) -> None:
    """A resumed search with thousands of trials would read them all after each end."""
    request(made, top=2, seeds=2, until=0.99)
    run(made, _tied)
    reads: list[None] = []
    adding = SeriesAdder(
        made.ledger,
        ends=itertools.count().__next__,
        flush=lambda: reads.append(None),
        fence=lambda: None,
    )
    assert [adding() for _ in range(3)] == [[], [], []]
    assert len(reads) == 1


def test_changed_training_is_refused_in_the_middle_and_counts_anew_after(made: MadeSweep) -> None:
    request(made, top=2, seeds=2, until=0.99)
    run(made, _tied, most=1)
    made.spec, before = with_overrides(made.spec, ["budget.epochs=12"]), made.spec
    with pytest.raises(OriginChanged) as refused:
        request(made)
    assert_parts(str(refused.value), "confirmation", "--accept-changes")
    made.spec = before
    run(made, _tied)
    made.spec = with_overrides(made.spec, ["budget.epochs=12"])
    request(made)
    assert len(run(made, _tied)) == 4


def test_leaders_are_configurations_best_first(made: MadeSweep) -> None:
    pruned = made.add("pruned", 0.1)
    finishing = made.ledger.add_extra("finish", pruned).number
    made.ledger.report(finishing, epoch=1, step=10, value=0.1)
    made.ledger.finish(finishing, "complete")
    confirming = made.ledger.add_extra("confirm", 1, 0).number
    made.ledger.report(confirming, epoch=1, step=10, value=0.01)
    made.ledger.finish(confirming, "complete")
    trials = made.ledger.trials()
    assert find_leaders(made.paths, made.spec, trials, 3) == [finishing, 1, 0]
    assert len(find_leaders(made.paths, made.spec, trials, None)) == 5


@pytest.mark.parametrize(
    ("options", "trials", "parts"),
    [
        ({}, 1, ["1 configuration with a result", "2 or more"]),
        ({}, 0, ["no configurations with a result"]),
        ({"metric": "[val/loss, val/accuracy]", "mode": "[min, max]"}, 2, ["2 metrics"]),
        (
            {"more": "early_stopping: {scheduler: pbt, grace_epochs: 1}"},
            3,
            ["population", "copy weights"],
        ),
    ],
)
def test_sweep_that_cannot_be_confirmed_says_why(
    tmp_path: Path, options: dict[str, Any], trials: int, parts: list[str]
) -> None:
    made = MadeSweep(tmp_path, **options)
    for value in range(trials):
        made.add("complete", [0.1 + value] * len(made.spec.metrics) if options else 0.1 + value)
    with pytest.raises(UserError) as refused:
        request(made)
    assert_parts(str(refused.value), *parts)
    assert made.ledger.series is None


@pytest.mark.parametrize(
    ("top", "seeds", "until", "option"),
    [
        (1, None, None, "--top 1"),
        (None, 1, None, "--seeds 1"),
        (None, None, 1.0, "--until 1"),
        (None, None, float("nan"), "--until nan"),
    ],
)
def test_numbers_out_of_range(
    top: int | None, seeds: int | None, until: float | None, option: str
) -> None:
    with pytest.raises(UserError, match=option):
        ConfirmLeaders(top=top, seeds=seeds, until=until).check_numbers()


def _clear(leader: int, seed: int) -> float:
    """Trial 0 is better than it looked, trial 1 was lucky."""
    return (0.20, 0.30, 0.40)[leader] + NOISE[seed] + 0.001 * ((leader + seed) % 3)


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
        f"Take trial {result.first.number}, which should",
        "cannot be told apart",
    )
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown(result, made.paths))
    printed = console.export_text()
    assert_parts(printed, "under more seeds: ", "confirm small", "--seeds 6", "show it: ")


def test_better_leader_is_taken(tmp_path: Path) -> None:
    """Two seeds each, and a deviation over seeds of 0.041 where the means are 0.28 apart."""
    values = ((1.152, 1.184), (1.484, 1.408))
    made = _confirmed(tmp_path, lambda leader, seed: values[leader][seed], top=2, seeds=2)
    result = find_confirmation(made.view)
    assert result is not None
    assert result.noise == pytest.approx(0.041, abs=5e-4)
    assert result.first is not None
    assert (result.first.number, result.is_decided, result.tied) == (0, True, [])
    assert result.sentences()[0].startswith("Take trial 0: it is the best of the leaders")
    assert confirmed_trial(made.view).number == 0


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
    found = _json(made, "best", "--confirmed")
    assert found["confirmation"]["said"] == sentence
    mean, seen = (f"{value:.4g}" for value in (found["confirmation"]["mean"], found["value"]))
    assert mean != seen, "the search chose a lucky one"
    root = ["--root", str(made.paths.root)]
    said = CliRunner().invoke(app, ["best", made.paths.name, "--confirmed", *root]).stdout
    first, seeds = said.splitlines()[0], len(found["confirmation"]["values"])
    assert first == (
        f"trial {found['number']}: val/loss {mean}, its mean over {seeds} seeds of the "
        f"confirmation (best val/loss {seen} in the search)"
    )


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
