"""Sweeps drawn around a table, and winners chosen in them, on small invented tables."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

from tests.bench.trust import _goals
from tests.bench.trust_audit import FAULTS, SOUND, SOUND_KINDS, make_sweep, verdicts
from tests.bench.trust_confirm import PLANS, choices
from tests.bench.trust_tables import KnownSweep, Table, read_tables


def _table(noise: float, shared: float = 0.0) -> Table:
    random = np.random.default_rng(0)
    values = np.linspace(1, 2, 200)[:, None] + random.normal(0, shared, 5)
    return Table("invented", values + noise * random.normal(size=(200, 5)))


def test_tables_are_read_as_plain_data(tmp_path):
    (tmp_path / "hpobench").mkdir()
    file = tmp_path / "hpobench" / "car.pkl"
    rows = {"00": {"val_acc": [0.5, 0.6]}, "01": {"val_acc": [0.7, 0.8]}, "02": {"val_acc": [1.0]}}
    file.write_bytes(pickle.dumps(rows))
    (table,) = read_tables(tmp_path)
    assert (table.name, table.values.tolist()) == ("hpobench/car", [[-0.5, -0.6], [-0.7, -0.8]])
    file.write_bytes(pickle.dumps({"00": {"val_acc": print}}))
    with pytest.raises(pickle.UnpicklingError, match="not plain data"):
        list(read_tables(tmp_path))


def test_a_drawn_sweep_has_the_noise_of_its_table():
    sweeps = [
        KnownSweep(_table(0.1, 0.3).values, np.random.default_rng(seed), 64) for seed in range(20)
    ]
    assert np.mean([np.mean(one.own**2) for one in sweeps]) == pytest.approx(0.01, rel=0.3)
    drawn = sweeps[0].draw(4000)
    apart = drawn - drawn.mean(axis=0)
    assert drawn.mean(axis=1) == pytest.approx(sweeps[0].truth, abs=0.03)
    assert apart.std(axis=1).mean() == pytest.approx(sweeps[0].own.mean(), rel=0.1)
    assert sweeps[0].rank(int(np.argmin(sweeps[0].truth))) == 1


def test_without_noise_every_way_chooses_the_best():
    for made in choices(_table(1e-6), 3, 0):
        assert {one.rank for one in made.values()} == {1}
        assert {one.best_leader for one in made.values()} == {True}


def test_a_race_chooses_better_and_says_the_truth():
    made = list(choices(_table(0.2), 25, 0))
    (by_value, by_race) = ([one[way] for one in made] for way in ("best value", str(PLANS[0])))
    assert np.mean([one.rank for one in by_race]) < np.mean([one.rank for one in by_value])
    assert np.mean([one.error for one in by_value]) > 0.1 > np.mean([one.error for one in by_race])
    assert np.mean([hit for one in by_race for hit in one.covered]) > 0.9


def test_goals_are_missed_where_a_race_is_wrong():
    noisy = _goals({"noisy": _by_way(0.5), "clear": _by_way(1e-6)})
    assert [one.met for one in noisy if "tables with" in one.row] == [False] * len(PLANS)
    clear = _goals({"clear": _by_way(1e-6)})
    assert all(one.met for one in clear if "rank" in one.row)


@pytest.mark.parametrize("kind", SOUND_KINDS)
def test_a_sound_sweep_has_warnings_by_chance_alone(kind):
    cards, making = SOUND_KINDS[kind]
    found = verdicts(making, cards, 10)
    assert all(one.count("warn") <= 4 for one in found.values())


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_seen_in_most_sweeps(fault):
    card, making = FAULTS[fault]
    assert verdicts(making, (card,), 10)[card].count("warn") >= 7


def test_made_sweeps_are_stopped_at_rungs():
    data = make_sweep(SOUND, np.random.default_rng(0))
    stopped = [trial for trial in data.trials if trial.stopped_early]
    assert {trial.end for trial in stopped} == set(data.rungs)
    assert not any(trial.exempt for trial in stopped)
    assert {trial.state for trial in data.trials} == {"complete", "pruned", "failed"}


def test_default_sampler_and_rule_make_sweeps():
    making = replace(SOUND, num_trials=24)
    data = make_sweep(making, np.random.default_rng(0), by_default=True)
    assert [trial.number for trial in data.trials] == list(range(24))
    assert {trial.end for trial in data.trials if trial.stopped_early} <= set(data.rungs)
    assert any(trial.exempt for trial in data.trials)
    assert all(trial.end == data.reports for trial in data.trials if trial.state == "complete")


def _by_way(noise):
    made = list(choices(_table(noise), 5, 0))
    return {way: [one[way] for one in made] for way in made[0]}
