"""Reading a ledger by plain SQL gives the same as the ledger itself."""

from __future__ import annotations

import math
import random
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import RandomSampler
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.errors import LedgerError
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.ranking import value_of
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.sqlite import LedgerFile
from sweeps.spec.sections import Select
from tests.make_trials import proposal

SPACE: dict[str, BaseDistribution] = {
    "train.optimizer.lr": FloatDistribution(1e-4, 1e-1, log=True),
    "train.batch_size": IntDistribution(8, 256, log=True),
    "train.dropout": FloatDistribution(0.0, 0.5, step=0.1),
    "train.optimizer.name": CategoricalDistribution((None, True, 2.5, "adamw", 7)),
}
ODD = (math.nan, math.inf, -math.inf, 0.0, -1e-300)


def _values(draw: random.Random) -> dict[str, Any]:
    return {
        "train.optimizer.lr": 10 ** draw.uniform(-4, -1),
        "train.batch_size": draw.randint(8, 256),
        "train.dropout": draw.choice([0.0, 0.1, 0.5]),
        "train.optimizer.name": draw.choice([None, True, 2.5, "adamw", 7]),
    }


def _trial(draw: random.Random, *, minimize: bool, select: Select) -> FrozenTrial:
    epochs = sorted(draw.sample(range(1, 30), draw.randint(0, 6)))
    reports = {e: draw.choice(ODD) if draw.random() < 0.4 else draw.gauss(0, 1) for e in epochs}
    several = {epoch: (value,) for epoch, value in reports.items()}
    values = value_of(several, minimize=minimize, select=select)
    best = None if values is None else values[0]
    state = draw.choice(list(TrialState))
    if state == TrialState.COMPLETE and best is None:
        state = TrialState.FAIL
    attributes: dict[str, Any] = {
        "attempts": draw.randint(0, 3),
        "progress": {"step": 10 * len(epochs), "epoch": epochs[-1] if epochs else 0},
    }
    if state == TrialState.FAIL:
        attributes |= {"reason": 'oom: "GPU" ünd \n more', "traceback": "Traceback\n  ..."}
    names = draw.sample(sorted(SPACE), draw.randint(0, len(SPACE)))
    drawn = _values(draw)
    return create_trial(
        state=state,
        value=best if state == TrialState.COMPLETE else None,
        params={name: drawn[name] for name in names},
        distributions={name: SPACE[name] for name in names},
        intermediate_values=reports,
        user_attrs=attributes if draw.random() < 0.9 else {},
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def _fill(ledger: Ledger, draw: random.Random, mode: str) -> None:
    trials = [_trial(draw, minimize=mode == "min", select=ledger.select) for _ in range(25)]
    address = f"sqlite:///{ledger.location.path}"
    optuna.load_study(study_name="sweep", storage=address).add_trials(trials)


@pytest.mark.parametrize("select", ["checkpoint", "final"])
@pytest.mark.parametrize(("seed", "mode"), [(0, "min"), (4, "max")])
def test_reader_equals_the_ledger(path: Path, seed: int, mode: Any, select: Any) -> None:
    created = Ledger.create(path, mode=mode, sweep_id="s-1", select=select)
    _fill(created, random.Random(seed), mode)
    ledger = Ledger.open(path)
    ledger.mark_published()
    records = ledger.trials()
    assert {record.state for record in records} == {
        "waiting",
        "running",
        "complete",
        "pruned",
        "failed",
    }
    view = LedgerReader(path)
    # repr tells NaN from None, 1 from True, and the order of the parameters
    assert list(map(repr, view.records())) == list(map(repr, records))
    assert repr(view.reports_of(7)) == repr(records[7].reports)
    best, expected = view.best(), ledger.best()
    assert best is not None
    assert expected is not None
    assert best.number == expected.number
    assert (view.sweep_id, view.num_published, view.minimize) == ("s-1", 25, mode == "min")
    assert view.select == ledger.select == select


@pytest.mark.parametrize("select", ["checkpoint", "final"])
def test_reader_equals_the_ledger_of_several_metrics(path: Path, select: Any) -> None:
    ledger = Ledger.create(path, mode=["min", "max"], sweep_id="s", select=select)
    for values in ([(0.5, 1.0), (0.25, math.inf)], [(0.75, 2.0)], []):
        number = ledger.add(proposal(SPACE, RandomSampler(seed=1))).number
        for epoch, (first, second) in enumerate(values, start=1):
            ledger.report(number, epoch=epoch, step=epoch, value=first, others=[second])
        if values and (select == "checkpoint" or math.isfinite(values[-1][1])):
            ledger.finish(number, "complete")
    view = LedgerReader(path)
    assert list(map(repr, view.records())) == list(map(repr, ledger.trials()))
    assert [trial.number for trial in view.front()] == ([0, 1] if select == "checkpoint" else [1])
    assert view.reports_of(0) == {1: [0.5, 1.0], 2: [0.25, math.inf]}


def test_an_empty_ledger_has_no_trials_and_no_best(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.db", mode="min", sweep_id="s")
    view = LedgerReader(tmp_path / "ledger.db")
    assert (view.trials, view.best(), view.num_published, view.reports()) == ([], None, 0, {})


def test_reading_rolls_back_a_killed_transaction(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path, mode="min", sweep_id="before")
    killed = (
        "import os, sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "db.execute('PRAGMA cache_size = 1')\n"  # pages reach the file before the commit
        "db.execute('BEGIN')\n"
        "db.execute('UPDATE study_user_attributes SET value_json = ?', ['\"half\"'])\n"
        "db.execute('CREATE TABLE filler (text)')\n"
        "db.executemany('INSERT INTO filler VALUES (?)', [('x' * 4000,)] * 50)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", killed, str(path)], check=False)
    assert path.with_name("ledger.db-journal").exists()
    assert LedgerReader(path).sweep_id == "before"


def test_reading_cannot_write(tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.db", mode="min", sweep_id="s")
    with (
        pytest.raises(LedgerError, match="readonly"),
        LedgerFile(tmp_path / "ledger.db").reading() as db,
    ):
        db.execute("DELETE FROM studies")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE version_info SET schema_version = 13",
        "UPDATE alembic_version SET version_num = 'v6.0.0.a'",
    ],
)
def test_tables_of_another_version_are_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "ledger.db"
    Ledger.create(path, mode="min", sweep_id="s")
    with sqlite3.connect(path) as db:
        db.execute(change)
    db.close()
    with pytest.raises(LedgerError, match=r"has tables of version .* this release reads version"):
        LedgerReader(path)


def test_missing_or_invalid_file_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="there is no ledger at"):
        LedgerReader(tmp_path / "missing.db")
    (tmp_path / "garbage.db").write_bytes(b"not a database" * 100)
    with pytest.raises(LedgerError, match="not a readable ledger"):
        LedgerReader(tmp_path / "garbage.db")
    sqlite3.connect(tmp_path / "empty.db").close()
    (tmp_path / "empty.db").touch()
    with pytest.raises(LedgerError, match="not a readable ledger"):
        LedgerReader(tmp_path / "empty.db")
