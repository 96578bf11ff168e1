"""Recorded curves, and their replay; nothing is trained."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from sweeps.spec.spec import SweepSpec
from tests.bench.curves.collect import _curve
from tests.bench.curves.points import PARAMETERS, unit_points, value_at
from tests.bench.curves.pool import AskTell, Job, Pool, PooledOurs
from tests.bench.curves.tables import (
    CURVES,
    DESIGN,
    DIRECTORY,
    HOLDOUT,
    CurveTable,
    read_table,
    recorded,
)
from tests.bench.quality_sweeps import drive

COUNT, SEEDS, EPOCHS = 12, 3, 5
SPACE = {"train.optimizer.lr": {"loguniform": [1e-4, 1.0]}, "train.batch_size": {"int": [1, 64]}}


@pytest.fixture
def table() -> CurveTable:
    """Losses that fall to a level, and prices that no two epochs share; configuration 3 diverges
    in its third epoch under every seed."""
    spec = SweepSpec.model_validate(
        {
            "name": "invented",
            "task": "digits",
            "metric": "val/loss",
            "mode": "min",
            "trials": COUNT,
            "concurrency": 1,
            "budget": {"epochs": EPOCHS},
            "resources": {"cpu": 1, "gpu": 0},
            "space": SPACE,
        }
    )
    params = [
        {"train.optimizer.lr": 10.0 ** (-3 * one / COUNT), "train.batch_size": 1 + 5 * one}
        for one in range(COUNT)
    ]
    level = np.arange(COUNT)[:, None, None] / COUNT
    loss = level + 1 / np.arange(1, EPOCHS + 1) + 0.001 * np.arange(SEEDS)[None, :, None]
    loss[3, :, 2:] = np.nan
    seconds = 1 + np.arange(loss.size).reshape(loss.shape) / loss.size
    columns = dict.fromkeys(CURVES, np.full(loss.shape, np.nan))
    columns |= {"val_loss": loss, "seconds": np.where(np.isnan(loss), np.nan, seconds)}
    return CurveTable("invented", spec, params, columns)


@pytest.fixture
def pool(table) -> Pool:
    return Pool(table, (0, 1), np.random.default_rng(0))


class RandomSearch:
    """Trains configurations in a random order, each to its end."""

    def __init__(self, count, epochs, random):
        self._left = random.permutation(count).tolist()
        self._epochs = epochs

    def ask(self):
        return Job(self._left.pop(), self._epochs) if self._left else None

    def tell(self, *_):
        return True


class OneEpochThenTop(RandomSearch):
    """Trains all for one epoch, then the best to their end, one after the other."""

    def __init__(self, count, epochs, random):
        super().__init__(count, epochs, random)
        self._waiting, self._first = count, {}

    def ask(self):
        if self._left:
            return Job(self._left.pop(), 1)
        if self._waiting or not self._first:
            return None
        best = min(self._first, key=self._first.__getitem__)
        del self._first[best]
        return Job(best, self._epochs)

    def tell(self, configuration, epoch, loss):
        if epoch == 1:
            self._waiting -= 1
            self._first[configuration] = loss
        return True


def _replay(pool, searcher, workers=1):
    side = AskTell(searcher, pool.table)
    reports = drive(
        side, pool.train, epochs=pool.table.epochs, at_once=workers, seconds=pool.seconds
    )
    return list(reports)


def _random(table) -> RandomSearch:
    return RandomSearch(len(table.params), table.epochs, np.random.default_rng(1))


def test_a_replay_equals_the_recorded_curves(table, pool):
    reports = _replay(pool, _random(table), workers=4)
    for number, params in enumerate(table.params):
        losses = [one.loss for one in reports if one.params == params]
        curve = table.curve(number, pool.seeds[number])
        ended = [math.nan] if number == 3 else []
        assert losses == pytest.approx([*curve, *ended], nan_ok=True)


def test_a_diverged_training_ends_and_is_the_worst(table, pool):
    lost = [one for one in _replay(pool, _random(table)) if math.isnan(one.loss)]
    assert [one.epoch for one in lost] == [3]
    assert table.last_epochs[3].tolist() == [2, 2, 2]
    assert math.isinf(table.truth[3])
    assert table.regret.argmin() == 0


def test_a_searcher_is_told_of_each_epoch_once(pool):
    told = []

    class Noting(RandomSearch):
        def tell(self, configuration, epoch, _loss):
            told.append((configuration, epoch))
            return True

    reports = _replay(pool, Noting(COUNT, EPOCHS, np.random.default_rng(0)), workers=3)
    assert len(told) == len(set(told)) == len(reports) == COUNT * EPOCHS - 2


def test_a_searcher_stops_a_training(pool):
    class Impatient(RandomSearch):
        def tell(self, _configuration, epoch, _loss):
            return epoch < 2

    reports = _replay(pool, Impatient(COUNT, EPOCHS, np.random.default_rng(0)))
    assert max(one.epoch for one in reports) == 2
    assert len(reports) == 2 * COUNT


def test_resumed_trainings_pay_new_epochs_alone(table, pool):
    search = OneEpochThenTop(COUNT, EPOCHS, np.random.default_rng(0))
    reports = _replay(pool, search)
    assert {one.epoch for one in reports[:COUNT]} == {1}
    assert [one.epoch for one in reports[COUNT : COUNT + EPOCHS - 1]] == [2, 3, 4, 5]
    assert {pool.index(one.params) for one in reports[COUNT : COUNT + EPOCHS - 1]} == {0}
    assert len(reports) == COUNT * EPOCHS - 2  # what the diverged training did not report
    paid = table.prices[np.arange(COUNT), pool.seeds].sum()
    never = table.prices[3, pool.seeds[3], 3:].sum()
    assert reports[-1].clock == pytest.approx(paid - never)


def test_workers_share_the_time(table, pool):
    alone = _replay(pool, _random(table))
    shared = _replay(pool, _random(table), workers=4)
    clocks = [one.clock for one in shared]
    assert clocks == sorted(clocks)
    assert alone[-1].clock / 4 <= shared[-1].clock < alone[-1].clock / 2
    assert len(shared) == len(alone)


def test_a_waiting_searcher_gets_the_next_report(pool):
    class OneAtATime(RandomSearch):
        busy = False

        def ask(self):
            if self.busy or not self._left:
                return None
            self.busy = True
            return Job(self._left.pop(), 1)

        def tell(self, *_):
            self.busy = False
            return True

    reports = _replay(pool, OneAtATime(COUNT, EPOCHS, np.random.default_rng(0)), workers=4)
    assert len(reports) == COUNT


def test_the_nearest_configuration_is_taken_once(table, pool):
    asked = table.params[5]
    first, second = pool.take_nearest(asked), pool.take_nearest(asked)
    assert first == 5
    assert second in (4, 6)
    rest = {pool.take_nearest(asked) for _ in range(COUNT - 2)}
    assert rest | {first, second} == set(range(COUNT))
    with pytest.raises(LookupError):
        pool.take_nearest(asked)


def test_ours_learns_recorded_parameters(table, pool):
    spec = table.spec.model_copy(update={"seed": 3})
    side = PooledOurs(spec, pool)
    list(drive(side, pool.train, epochs=EPOCHS, at_once=1, seconds=pool.seconds))
    trials = side.trials()
    assert sorted(pool.index(trial.params) for trial in trials) == list(range(COUNT))
    assert [trial.state for trial in trials].count("failed") == 1


def test_collected_columns_end_where_a_training_diverged():
    points = [
        ("train/loss", 1, 4.0),
        ("train/loss", 2, 2.0),
        ("val/loss", 2, 1.5),
        ("train/loss", 3, 1.0),
        ("val/loss", 4, 0.5),
        ("train/loss", 5, 99.0),
    ]
    found = pd.DataFrame(points, columns=["metric", "step", "value"])
    columns = dict(zip(CURVES, _curve(found, 4), strict=True))
    assert columns["val_loss"] == pytest.approx([1.5, 0.5, math.nan, math.nan], nan_ok=True)
    assert columns["train_loss"] == pytest.approx([3.0, 1.0, math.nan, math.nan], nan_ok=True)
    assert np.isnan(columns["grad_norm"]).all()
    assert np.isnan(_curve(None, 4)).all()


def test_recorded_tables_are_whole_and_small():
    files = list(DIRECTORY.glob("*.parquet"))
    assert sorted(file.stem for file in files) == sorted((*DESIGN, *HOLDOUT)) == sorted(recorded())
    assert sum(file.stat().st_size for file in files) < 10_000_000
    for name in recorded():
        table = read_table(name)
        configurations, seeds, epochs = table.loss.shape
        assert (seeds, epochs) == (3, table.spec.budget.epochs)
        assert configurations == 128
        reported = np.isfinite(table.loss)
        assert (np.diff(reported.astype(int), axis=2) <= 0).all()
        assert np.isfinite(table.columns["seconds"][reported]).all()
        assert (table.places >= 0).all()
        assert (table.places <= 1).all()
        assert table.regret[table.truth.argmin()] == 0


def test_recorded_points_are_the_sequence():
    table = read_table("friedman")
    distributions = [table.spec.space[key].to_optuna() for key in PARAMETERS]
    for params, point in zip(table.params, unit_points(len(table.params)), strict=True):
        expected = map(value_at, point, distributions)
        assert [params[key] for key in PARAMETERS] == pytest.approx(list(expected))
