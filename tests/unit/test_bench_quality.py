"""The problems and the tables of `tests.bench.quality`; nothing is measured."""

from __future__ import annotations

import math

import pytest

from tests.bench import hard
from tests.bench.hard_problems import HARD
from tests.bench.quality_problems import EPOCHS, PROBLEMS
from tests.bench.rows_file import read


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


def test_hard_problems_are_searched_and_compared_with_random(tmp_path):
    rows = tmp_path / "rows.jsonl"
    hard.fill(rows, ["flat", "nan-branin", "conditional"], [4], ["random", "random + asha"], 1)
    first = rows.read_text()
    hard.fill(rows, ["flat", "nan-branin"], [4], ["random"], 1)
    assert rows.read_text() == first
    found = {(row["problem"], row["search"]): row for row in read(rows)}
    assert found["nan-branin", "random"]["failed"] > 0
    assert found["flat", "random + asha"]["trials"] > 3 * found["flat", "random"]["trials"]
    assert found["flat", "random"]["distinct"] > 15
    assert found["conditional", "random"]["regret"] > 0
    (result,) = hard.show(read(rows))
    assert "of 2" in result.row


@pytest.mark.parametrize("search", hard.SEARCHES)
def test_rules_with_rungs_free_workers_of_hard_problems(search, monkeypatch):
    """Of four first reports some are stopped or paused by `asha` and its kin, by others none."""
    monkeypatch.setattr(hard, "BUDGET", 4)
    rungs = search.endswith(("asha", "asha_promote", "hyperband"))
    assert (hard.measure("conditional", 4, search, 0)["trials"] > 4) == rungs


def test_holm_corrects_for_the_number_of_problems():
    assert hard.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert hard.holm([0.6, 0.3]) == [0.6, 0.6]
    assert hard.holm([]) == []


@pytest.mark.parametrize(("regrets", "worse"), [((1.0, 3.0), 0), ((1.0, 1.0), 0), ((3.0, 2.0), 1)])
def test_a_search_is_worse_if_it_is_after_correction(regrets, worse):
    """Of two problems, on one of which 8 seeds of each are clearly apart."""
    rows = [
        {"problem": problem, "workers": 1, "search": search, "seed": seed, "regret": regret}
        | {"trials": 20, "failed": 0, "distinct": 0}
        for problem, search, regret in (
            ("mixed", "random", 2.0),
            ("mixed", "tpe", regrets[0]),
            ("conditional", "random", 3.0),
            ("conditional", "tpe", regrets[1]),
        )
        for seed in range(8)
    ]
    (result,) = hard.show(rows)
    assert result.ours == worse
    assert "of 2" in result.row


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("mixed", {"kind": "a", "x": 0.2, "rate": 10**-1.2, "layers": 5}),
        ("conditional", {"kind": "adam", "rate": 10**-2.8, "beta": 0.8, "width": 0.5}),
    ],
)
def test_optimum_of_a_hard_problem_has_no_regret(name, best):
    problem = HARD[name]
    params = {f"task.{key}": value for key, value in best.items()}
    assert problem.regret(params) == pytest.approx(0, abs=1e-9)
    assert [*problem.train(0, 0, params)][-1] == pytest.approx(0, abs=1e-9)
