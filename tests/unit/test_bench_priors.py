"""What the benchmark of priors compares; its figures are no tests."""

from __future__ import annotations

import pytest

from tests.bench.priors import AT, CORNER, FORMS, NEAR, NONE, WORST, measure, places, show
from tests.bench.quality_problems import PROBLEMS


@pytest.mark.parametrize("name", FORMS)
def test_places_of_priors_are_right_and_wrong(name: str) -> None:
    problem = PROBLEMS[name]

    def loss(kind: str) -> float:
        at = places(name, kind, 0)
        assert at is not None
        assert all(0 <= one <= 1 for one in at)
        bounds = zip(at, problem.bounds, strict=True)
        return problem.function([low + one * (high - low) for one, (low, high) in bounds])

    assert loss(AT) == pytest.approx(problem.best, abs=1e-4)
    assert loss(AT) < loss(NEAR) < loss(WORST)
    assert loss(AT) < loss(CORNER) <= loss(WORST)
    assert places(name, NONE, 0) is None


def test_prior_at_the_best_point_ends_a_search_at_once() -> None:
    rows = [
        {"seed": seed, "problem": "branin-alike", "prior": kind}
        | measure(seed, "branin-alike", kind)
        for seed in range(2)
        for kind in (NONE, AT)
    ]
    assert [row["reached"] for row in rows if row["prior"] == AT] == [1, 1]
    assert all(row["around"] == 0 for row in rows if row["prior"] == NONE)
    assert [result.met for result in show(rows)] == [True]
