"""Each private part of Optuna in `sweeps/optuna_compat/` still is what the project relies on.

A new release of Optuna that changes one fails here by the part's name.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.failed_attempts import FailedAttempt, Reopened
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.optuna_compat import samplers, tables

SPACE: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-4, 1e-1, log=True),
    "width": IntDistribution(8, 64),
    "kind": CategoricalDistribution(("sgd", "adam")),
}
PARAMS = {"lr": 0.01, "width": 16, "kind": "adam"}


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def running(**more: Any) -> FrozenTrial:
    return create_trial(state=TrialState.RUNNING, params=PARAMS, distributions=SPACE, **more)


@pytest.fixture(scope="module")
def rdb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RDBStorage]:
    """One storage of Optuna's for all tests, because creating the tables takes half a second."""
    opened = RDBStorage(f"sqlite:///{tmp_path_factory.mktemp('optuna')}/study.db")
    yield opened
    opened.engine.dispose()


@pytest.fixture
def study_id(rdb: RDBStorage) -> Iterator[int]:
    created = rdb.create_new_study([StudyDirection.MINIMIZE], "sweep")
    yield created
    for study in rdb.get_all_studies():
        rdb.delete_study(study._study_id)


# -- Tables ---------------------------------------------------------------------------------------


def test_importing_the_tables_does_not_import_optuna() -> None:
    program = (
        "import sys, sweeps.optuna_compat.tables as _;"
        "sys.exit({'optuna', 'sqlalchemy'} & {*sys.modules})"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    # `sys.exit` of a set prints it
    assert child.stderr.decode().strip() in ("", "set()")


def test_schema(rdb: RDBStorage) -> None:
    assert tables.SCHEMA[0] == models.SCHEMA_VERSION
    assert rdb.get_head_version() == tables.SCHEMA[1]
    with rdb.engine.connect() as db:
        ((number, library),) = db.execute(sqlalchemy.text(tables.VERSION_QUERY))
        ((revision,),) = db.execute(sqlalchemy.text(tables.REVISION_QUERY))
    assert (number, revision) == tables.SCHEMA
    assert library == optuna.__version__
    names = set(sqlalchemy.inspect(rdb.engine).get_table_names())
    assert {"version_info", "alembic_version", tables.STUDIES_TABLE} <= names


def test_queries_read_what_optuna_writes(rdb: RDBStorage, study_id: int) -> None:
    rdb.set_study_user_attr(study_id, "note", [1])
    number = rdb.create_new_trial(study_id, running(user_attrs={"a": 1}))
    rdb.set_trial_intermediate_value(number, 1, 0.5)
    rdb.set_trial_intermediate_value(number, 2, math.inf)
    rdb.set_trial_intermediate_value(number, 3, math.nan)
    rdb.set_trial_state_values(number, TrialState.COMPLETE, [-math.inf])
    report = "key GLOB 'report *'"
    with rdb.engine.connect() as db:

        def ask(query: str, **given: Any) -> list[Any]:
            return [tuple(row) for row in db.execute(sqlalchemy.text(query), given)]

        assert ask(tables.DIRECTIONS_QUERY, name="sweep") == [(study_id, "MINIMIZE")]
        assert ask(tables.STUDY_ATTRIBUTES_QUERY, study=study_id) == [("note", "[1]")]
        ((_, first, state, began, ended),) = ask(tables.TRIALS_QUERY, study=study_id)
        assert (first, state, bool(began), bool(ended)) == (0, "COMPLETE", True, True)
        attributes = tables.ATTRIBUTES_QUERY.format(is_report=report)
        assert ask(attributes, study=study_id) == [(number, "a", "1")]
        intermediate = tables.number_sql(*tables.INTERMEDIATE_VALUE)
        reports = tables.REPORTS_QUERY.format(number=intermediate)
        found = ask(reports, study=study_id)
        assert found == [(0, 1, 0.5), (0, 2, math.inf), (0, 3, None)]
        values = tables.VALUES_QUERY.format(number=tables.number_sql(*tables.VALUE))
        assert ask(values, study=study_id) == [(number, -math.inf)]
        decode = tables.ParamDecoder()
        stored = ask(tables.PARAMS_QUERY, study=study_id)
        assert {name: decode(value, text) for _, name, value, text in stored} == PARAMS


# -- What is written ------------------------------------------------------------------------------


def test_schema_is_that_of_optuna(rdb: RDBStorage, tmp_path: Path) -> None:
    Ledger.create(tmp_path / "ledger.db", mode="min", sweep_id="s")
    found = []
    for path in (str(rdb.engine.url.database), tmp_path / "ledger.db"):
        with contextlib.closing(sqlite3.connect(path)) as db:
            rows = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
            versions = [*db.execute(tables.VERSION_QUERY), *db.execute(tables.REVISION_QUERY)]
        schema = {(kind, name, " ".join((sql or "").split())) for kind, name, sql in rows}
        found.append((schema, versions))
    assert found[0] == found[1]


def _told(trial: FrozenTrial) -> dict[str, str]:
    """What a trial is, whatever the order of its attributes; `repr` tells NaN from None."""
    attributes = sorted(trial.user_attrs.items())
    return {key: repr(value) for key, value in vars(trial).items()} | {
        "_user_attrs": repr(attributes)
    }


@pytest.mark.parametrize("modes", [["min"], ["min", "max"]])
def test_optuna_reads_what_the_ledger_writes(tmp_path: Path, modes: Any) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", mode=modes, sweep_id="s", select="final")
    others = [2.0] * (len(modes) - 1)
    for ending in ("complete", "pruned", "failed", "pruned", None):
        point = Suggestion(PARAMS, SPACE, {"drawn": [1, None]})
        number = ledger.add(point, place=7, started=True).number
        for epoch, value in enumerate((math.nan, math.inf, -math.inf, 0.5), start=1):
            ledger.report(number, epoch=epoch, step=epoch, value=value, others=others)
        if ending is not None:
            ledger.finish(number, ending, reason="why", seconds=1.5)
    ledger.add(Suggestion({"width": 0.5}, {"width": FloatDistribution(0, 1)}))
    ledger.reopen(2, FailedAttempt(1, "why", 4, 1, 2, ""), Reopened(False, False), steps={2: 2})
    study = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/ledger.db")
    read = study.get_trials()
    assert [one.state.name[0] for one in read] == [*"CPRPRR"]
    assert [*map(_told, read)] == [*map(_told, ledger.frozen_trials())]
    again = Ledger.open(tmp_path / "ledger.db")
    assert [*map(_told, read)] == [*map(_told, again.frozen_trials())]
    assert study.user_attrs == {"sweep_id": "s", "select": "final", "concluded": 0}
    assert study.directions == ledger.directions
    assert study.ask(SPACE).number == 6


def test_trial_id() -> None:
    trial = running()
    samplers.set_trial_id(trial, 7)
    assert trial._trial_id == 7
    assert trial.number != 7


# -- Samplers -------------------------------------------------------------------------------------


def test_set_trial_attribute() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.ask()
    (trial,) = study.get_trials()
    samplers.set_trial_attribute(study, trial, "a", [1])
    assert study.get_trials()[0].system_attrs["a"] == [1]


def test_kernel_fits() -> None:
    pytest.importorskip("torch")
    sampler = optuna.samplers.GPSampler(seed=0, n_startup_trials=2)
    assert samplers.kernel_fits(sampler) == []
    study = optuna.create_study(sampler=sampler)
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1) ** 2, n_trials=3)
    (fit,) = samplers.kernel_fits(sampler)
    assert len(fit.inverse_squared_lengthscales.tolist()) == 1
    assert fit.kernel_scale.item() > 0
    assert fit.noise_var.item() > 0
    other = optuna.samplers.GPSampler(seed=0, n_startup_trials=2)
    samplers.set_kernel_fits(other, [fit])
    assert samplers.kernel_fits(other) == [fit]
    restored = optuna.create_study(sampler=other)
    restored.add_trials(study.get_trials())
    restored.ask().suggest_float("x", 0, 1)  # fits, starting from what was set
    assert samplers.kernel_fits(other) != [fit]


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_indexed_qmc_sampler() -> None:
    pytest.importorskip("scipy")
    name = "_find_sample_id"
    assert parameters(getattr(samplers.IndexedQMCSampler, name)) == parameters(
        getattr(optuna.samplers.QMCSampler, name)
    )

    def point(index: int) -> float:
        sampler = samplers.IndexedQMCSampler(seed=0, scramble=True)
        sampler.index = index
        study = optuna.create_study(sampler=sampler)
        study.add_trial(create_trial(value=0, params=PARAMS, distributions=SPACE))
        trial = study.ask({"lr": SPACE["lr"]})
        return float(trial.params["lr"])

    plain = optuna.create_study(sampler=optuna.samplers.QMCSampler(seed=0, scramble=True))
    plain.add_trial(create_trial(value=0, params=PARAMS, distributions=SPACE))
    expected = []
    for _ in range(3):
        trial = plain.ask({"lr": SPACE["lr"]})
        expected.append(trial.params["lr"])
        plain.tell(trial, 0.0)
    assert [point(index) for index in range(3)] == expected


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_first_generation() -> None:
    """Trials without a generation become members of the first one, the parents of the next."""
    space: dict[str, BaseDistribution] = {"x": optuna.distributions.FloatDistribution(0, 1)}
    given = [create_trial(value=x, params={"x": x}, distributions=space) for x in (0.25, 0.5)]
    for kind in (optuna.samplers.NSGAIISampler, optuna.samplers.NSGAIIISampler):
        sampler = kind(seed=0, population_size=2)
        study = optuna.create_study(sampler=sampler)
        study.add_trials(samplers.in_generations(given, sampler))
        study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
        (key,) = study.get_trials()[0].system_attrs
        assert [trial.system_attrs[key] for trial in study.get_trials()] == [0, 0, 1]
    assert samplers.in_generations(given, optuna.samplers.RandomSampler()) == given


def test_gp_sampler_suggests_the_best_allowed_point() -> None:
    space: dict[str, BaseDistribution] = {"x": optuna.distributions.FloatDistribution(0, 1)}
    points = [0.05, 0.1, 0.15]
    suggested = []
    for allows in (None, lambda point: point["x"] <= 0.2, lambda _: False):
        sampler = samplers.AllowingGPSampler(seed=0, n_startup_trials=1)
        sampler.allows = allows
        study = optuna.create_study(sampler=sampler)
        study.add_trials(
            [create_trial(value=-x, params={"x": x}, distributions=space) for x in points]
        )
        suggested.append(study.ask(space).params["x"])
    anywhere, allowed, nowhere = suggested
    assert anywhere > 0.2 == pytest.approx(allowed, abs=0.01)
    assert allowed <= 0.2
    assert nowhere == anywhere
