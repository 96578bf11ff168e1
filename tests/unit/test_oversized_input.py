"""Oversized input: metric names, values, grids, failure reasons. The memory stays bounded, and
each refusal has a message.
"""

from __future__ import annotations

import json
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.errors import SpecError
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.custom_loop import CustomLoop
from trainable.errors import TaskError
from trainable.logged import NOTED, Log
from trainable.loop_context import Opening
from trainable.store.metrics_file import LOGGED, read_rows
from trainable.task import Data, Task

MIB = 1 << 20
SPEC = """
name: flooded
task: {{name: digits{task}}}
metric: val/loss
mode: min
trials: {trials}
space: {space}
{more}
"""


@contextmanager
def _at_most(num_bytes: int) -> Iterator[None]:
    """What is done within allocates no more at any moment."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < num_bytes, f"{peak / MIB:.0f} MiB"


def _spec(
    *overrides: str,
    task: str = "",
    trials: int = 4,
    space: str = "{}",
    more: str = "",
    environ: Mapping[str, str] | None = None,
) -> SweepSpec:
    text = SPEC.format(task=task, trials=trials, space=space, more=more)
    return parse_spec(text, "flooded.yaml", overrides, environ=environ or {})


def _refusal(made: Callable[[], object]) -> str:
    with pytest.raises(SpecError) as refused:
        made()
    said = str(refused.value)
    assert len(said) < 2000, len(said)
    return said


# --- names of metrics -------------------------------------------------------------------------


def _config(task: str, epochs: int = 3) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": task},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": epochs},
            "train": {"batch_size": 4},
        }
    )


def _own_loop(reports: list[dict[str, float]], directory: Path) -> CustomLoop:
    def run(config: Any, context: Any) -> Iterator[dict[str, float]]:
        del config, context
        yield from reports

    config = _config("flooded:run", len(reports))
    return CustomLoop(run, config, Opening(directory, torch.device("cpu")))


@pytest.mark.parametrize(
    "reports",
    [
        pytest.param([100_000], id="in one report"),
        pytest.param([4_000] * 25, id="others in each report"),
    ],
)
def test_a_loop_yields_too_many_names(tmp_path: Path, reports: list[int]) -> None:
    given = [
        {"val/loss": 1.0, **{f"sample/{at}/{n}": 0.5 for n in range(count)}}
        for at, count in enumerate(reports)
    ]
    with _at_most(32 * MIB), _own_loop(given, tmp_path) as run:
        with pytest.raises(TaskError, match=r"(100001|8001) metrics .* at most 5000 .*file"):
            list(run.events())
        assert sum(len(row.metrics) for row in read_rows(tmp_path)) < 5_000


def test_a_loop_yields_as_many_names_as_classes(tmp_path: Path) -> None:
    given = {"val/loss": 1.0, **{f"recall/{n}": 0.5 for n in range(4_000)}}
    with _own_loop([given, given], tmp_path) as run:
        assert [report.metrics["recall/3999"] for report in run.events()] == [0.5, 0.5]


def test_a_loop_yields_a_name_of_ten_megabytes(tmp_path: Path) -> None:
    given = {"val/loss": 1.0, "x" * 10 * MIB: 0.5}
    with _at_most(64 * MIB), _own_loop([given], tmp_path) as run:
        with pytest.raises(TaskError, match=r"has 10485760 characters; .* at most 1000; ") as told:
            list(run.events())
        assert len(str(told.value)) < 500


class _Flooding(Task):
    def build_model(self) -> torch.nn.Module:
        return torch.nn.Linear(2, 2)

    def build_data(self) -> Data:
        data = (torch.zeros(8, 2), torch.zeros(8, dtype=torch.long))
        return Data(train=data, val=data)

    def evaluate(self, model: Any, batches: Any) -> dict[str, float]:
        del model, batches
        return {"loss": 1.0, **{f"sample/{n}": 0.5 for n in range(100_000)}}


def test_evaluate_returns_too_many_names(tmp_path: Path) -> None:
    config = _config("flooded:Flooding")
    with open_trainer(config, tmp_path, task=_Flooding(), device="cpu") as run:
        with pytest.raises(TaskError, match=r"returned 100001 metrics .* at most 5000"):
            list(run.events())
        assert all(len(row.metrics) < 100 for row in read_rows(tmp_path))


def test_the_plain_mlflow_api_is_given_too_many_names(tmp_path: Path) -> None:
    log = Log()
    log.directory = tmp_path

    def flood() -> None:
        for number in range(100_000):
            log.add_row(f"sample/{number}", 0.5, number, 0)

    with pytest.raises(TaskError, match=r"at most 5000 .*file"):
        flood()
    assert len(log.take_rows(())) == 5_000
    assert not (tmp_path / LOGGED).exists()


@pytest.mark.parametrize("kind", ["params", "tags"])
def test_mlflow_api_gets_too_many_parameters_or_tags(tmp_path: Path, kind: Any) -> None:
    log = Log()
    log.directory = tmp_path
    with _at_most(64 * MIB), pytest.raises(TaskError, match=r"100000 .* at most 1000, .*log_file"):
        log.set_values(kind, {f"layer.{number}": "x" * 100 for number in range(100_000)})
    assert not (tmp_path / NOTED).exists()
    log.set_values(kind, {"layer": "8"})
    assert log.take_values() == {kind: {"layer": "8"}}


# --- one value ---------------------------------------------------------------------------------


def test_parameter_of_ten_megabytes_is_truncated(tmp_path: Path) -> None:
    log = Log()
    log.directory = tmp_path
    log.set_values("params", {"vocabulary": "word " * 2 * MIB})
    kept = json.loads((tmp_path / NOTED).read_text())["params"]["vocabulary"]
    assert kept.startswith("word word")
    assert kept.endswith("…")
    assert len(kept) == 10_000
    assert log.take_values() == {"params": {"vocabulary": kept}}


@pytest.mark.parametrize("override", ["task.words={}", "{}", "task.{}=1", "space={}"])
def test_an_override_of_ten_megabytes(override: str) -> None:
    text = override.format("x" * 10 * MIB)
    with _at_most(64 * MIB):
        said = _refusal(lambda: _spec(text))
    assert f"has {len(text)} characters; an override has at most 131072; " in said


def test_variables_that_are_expanded_to_a_gigabyte() -> None:
    space = '{task.words: {choice: ["' + "${BIG}" * 10_000 + '"]}}'
    with _at_most(128 * MIB):
        said = _refusal(lambda: _spec(space=space, environ={"BIG": "x" * 100_000}))
    assert "more than 8388608 characters, aliases and variables counted in full; " in said


def test_aliases_of_one_long_text() -> None:
    text = f", words: &w {'x' * 500_000}, all: [{', '.join(['*w'] * 4_000)}]"
    with _at_most(256 * MIB):
        said = _refusal(lambda: _spec(task=text))
    assert "more than 8388608 characters, aliases and variables counted in full; " in said


# --- a grid ------------------------------------------------------------------------------------

WIDE = "{task.a: {int: [1, 1000]}, task.b: {int: [1, 1000]}, task.c: {quniform: [1, 1000, 1]}}"


def test_grid_of_a_billion_points_is_counted_lazily() -> None:
    with _at_most(16 * MIB):
        spec = _spec(trials=10**9 + 1, space=WIDE, more="search: {sampler: grid}")
        assert spec.num_trials == 10**9


def test_more_trials_than_a_small_grid_has_points() -> None:
    space = "{task.a: {int: [1, 3]}, task.b: {quniform: [0, 1, 0.5]}, task.c: {choice: [a, b]}}"
    spec = _spec(trials=10**9, space=space, more="search: {sampler: grid}")
    assert spec.num_trials == 18


# --- reasons -----------------------------------------------------------------------------------


def test_reason_of_ten_megabytes_is_truncated(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None)
    sweep.ledger.finish(
        number, "failed", reason="lost: " + "x" * 10 * MIB, traceback="y\n" * 5 * MIB + "at end"
    )
    assert sweep.paths.ledger.stat().st_size < MIB
    (record,) = sweep.view.records
    assert record.reason is not None
    assert record.traceback is not None
    assert (len(record.reason), len(record.traceback)) == (5_000, 20_000)
    assert record.reason.startswith("lost: xxx")
    assert record.traceback.endswith("at end")


def _fill(sweep: MadeSweep, count: int, reason: str, traceback: str) -> None:
    """Trials that failed as an earlier release, which clipped nothing, kept them."""
    sweep.add("failed", 0.5, reason=reason)
    with closing(sqlite3.connect(sweep.paths.ledger)) as db, db:
        ((first,),) = db.execute("SELECT trial_id FROM trials")
        db.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?) "
            "INSERT INTO trials (number, study_id, state, datetime_start, datetime_complete) "
            "SELECT i, study_id, state, datetime_start, datetime_complete FROM trials, n",
            (count - 1,),
        )
        for key, text in (("reason", reason), ("traceback", traceback)):
            db.execute("DELETE FROM trial_user_attributes WHERE key = ?", (key,))
            db.execute(
                "INSERT INTO trial_user_attributes (trial_id, key, value_json) "
                "SELECT trial_id, ?, ? FROM trials",
                (key, json.dumps(text)),
            )
        db.execute(
            "INSERT INTO trial_params (trial_id, param_name, param_value, distribution_json) "
            "SELECT trials.trial_id, param_name, param_value, distribution_json "
            "FROM trials, trial_params WHERE trials.trial_id != ?",
            (first,),
        )


@pytest.mark.parametrize(
    ("count", "memory"),
    [(1_000, 96 * MIB), pytest.param(10_000, 512 * MIB, marks=pytest.mark.chaos)],
)
def test_many_trials_with_reasons_of_ten_kilobytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, memory: int
) -> None:
    sweep = MadeSweep(tmp_path / "runs")
    _fill(sweep, count, "ValueError: " + "r" * 10_000, "t" * 10_000)
    monkeypatch.chdir(tmp_path)
    for command in (
        ["status"],
        ["trials"],
        ["trials", "--json"],
        ["show", str(count - 1)],
        ["list"],
        ["best"],
        ["report"],
    ):
        words = [command[0], *(["small"] if command[0] != "list" else []), *command[1:]]
        with _at_most(memory):
            done = CliRunner().invoke(app, [*words, "--root", "runs"])
        assert done.exit_code in (0, 3), done.output[-2000:]
        assert done.exception is None or isinstance(done.exception, SystemExit)
        assert len(done.output) < (64 if "--json" in words else 16) * MIB, command


def test_reasons_of_a_megabyte_are_read_one_by_one(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    _fill(sweep, 100, "r" * MIB, "t" * MIB)
    with _at_most(32 * MIB):
        records = sweep.view.records
    assert {len(record.reason or "") for record in records} == {5_000}
