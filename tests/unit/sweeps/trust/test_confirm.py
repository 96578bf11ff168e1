"""Which trials a confirmation needs, by the request and the ledger alone."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import OriginChanged, UserError
from sweeps.reconcile.extra_training import SeriesAdder
from sweeps.trust.confirm import ConfirmLeaders, find_leaders
from tests.message_parts import assert_parts
from tests.specs import with_overrides
from tests.unit.sweeps.confirming_sweep import add, end, found, request, run
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


def test_dropped_leader_trains_no_more(made: MadeSweep) -> None:
    request(made, top=3, seeds=4, until=0.99)
    runs = run(
        made, lambda leader, seed: 0.9 + NOISE[seed] if leader == 2 else _tied(leader, seed)
    )
    lost = [seed for leader, seed in runs if leader == 2]
    assert found(made).dropped[2] == len(lost) < 4
    assert (0, 3) in runs  # the others cannot be told apart


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


def test_stopped_run_puts_its_leader_out(made: MadeSweep) -> None:
    request(made, top=2, seeds=2)
    first = add(made)[0]
    made.ledger.finish(first.number, "pruned", reason="stopped by the user")
    assert "stopped by the user" in found(made).failed[1]


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
        (None, 10**9, None, "--seeds 1000000000"),
        (None, None, 1.0, "--until 1"),
        (None, None, 0.3, "--until 0.3"),
        (None, None, float("nan"), "--until nan"),
    ],
)
def test_numbers_out_of_range(
    top: int | None, seeds: int | None, until: float | None, option: str
) -> None:
    with pytest.raises(UserError, match=option):
        ConfirmLeaders(top=top, seeds=seeds, until=until).check_numbers()


def test_more_leaders_than_configurations(made: MadeSweep) -> None:
    with pytest.raises(UserError, match="from 2 to 4"):
        request(made, top=5)
