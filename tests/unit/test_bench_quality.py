"""The problems and the tables of `tests.bench.quality`; nothing is measured."""

from __future__ import annotations

import json
import math

import pytest

from tests.bench.quality import fill, read
from tests.bench.quality_cases import OURS, SEARCHES, Size
from tests.bench.quality_problems import EPOCHS, PROBLEMS
from tests.bench.quality_table import epochs_table


@pytest.mark.parametrize(
    ("name", "minimum"),
    [
        ("branin", (-math.pi, 12.275)),
        ("branin", (math.pi, 2.275)),
        ("branin", (9.42478, 2.475)),
        ("hartmann6", (0.20169, 0.150011, 0.476874, 0.275332, 0.311652, 0.6573)),
    ],
)
def test_minima_are_where_the_literature_has_them(name, minimum):
    problem = PROBLEMS[name]
    params = {f"task.x{i}": value for i, value in enumerate(minimum)}
    assert problem.loss(params, 1) == pytest.approx(problem.best, abs=1e-5)


def test_learning_curves_fall_to_the_function_value_and_cross():
    problem = PROBLEMS["hartmann6-crossing"]
    better_but_slow = dict.fromkeys((f"x{i}" for i in range(6)), 0.3)
    worse_but_fast = better_but_slow | {"x0": 0.9, "x5": 0.6}
    slow, fast = (
        [problem.loss(params, epoch) for epoch in range(1, EPOCHS + 1)]
        for params in (better_but_slow, worse_but_fast)
    )
    assert slow == sorted(slow, reverse=True)
    assert problem.worst > slow[0] > fast[0]
    assert slow[-1] == pytest.approx(problem.final(better_but_slow))
    assert slow[-1] < fast[-1]


def test_recorded_results_are_not_measured_again(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    size = Size(2, (2,), ("branin-alike",), ("random", "asha + random"))
    fill("epochs", size, rows, seconds=0)
    assert read(rows) == []
    fill("epochs", size, rows)
    first = rows.read_text()
    assert [json.loads(line)["seed"] for line in first.splitlines()] == [0, 0, 1, 1]
    fill("epochs", size, rows)
    assert rows.read_text() == first
    capsys.readouterr()
    epochs_table(size, read(rows))
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("branin-alike") for line in lines) == 6


def test_stopping_early_spends_less_on_one_trial_more(tmp_path):
    """Of two searches with the same trials, one of which stops the bad ones."""
    size = Size(1, (1,), ("branin-alike",), ("random", "asha + random"))
    fill("epochs", size, tmp_path / "rows.jsonl")
    alone, stopped = read(tmp_path / "rows.jsonl")
    assert stopped["reached"]["0.5"] < alone["reached"]["0.5"] / 3
    assert OURS in SEARCHES
