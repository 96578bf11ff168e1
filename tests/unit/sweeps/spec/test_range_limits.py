"""A value that a range draws is in it, and comes back from a study as it was, up to the limits."""

from __future__ import annotations

import random
from typing import Any

import optuna
import pytest

from sweeps.errors import SearchChanged
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.search_checks import range_faults
from sweeps.spec.sections import SearchConfig
from sweeps.spec.space_parser import parse_distribution
from sweeps.spec.spec import SweepSpec, parse_spec

AT_THE_LIMITS: list[dict[str, Any]] = [
    {"int": [-(2**53), 2**53]},
    {"int": [1, 2**53 - 1], "step": 2},
    {"logint": [1, 2**53]},
    {"quniform": [0, 1, 1e-7]},
    {"quniform": [0, 1_000_000, 0.1]},
    {"quniform": [-7.3, 999_999.7, 0.1]},
    {"quniform": [999_999, 1_000_000, 0.1]},
    {"uniform": [-8e307, 8e307]},
    {"uniform": [1, 1.0000000000000002]},
    {"loguniform": [5e-324, 1e-320]},
    {"loguniform": [1e-150, 1e150]},
    {"powers": [1, 2**60, 2]},
    {"choice": [2**53, 2**53 + 1]},
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # TPE: no density tells 2**53 numbers apart
@pytest.mark.parametrize("data", AT_THE_LIMITS, ids=str)
def test_values_survive_a_study(data: dict[str, Any]) -> None:
    distribution = parse_distribution(data)
    assert not list(range_faults({"task.a": distribution}, SearchConfig()))
    kept, generator = distribution.to_optuna(), random.Random(0)
    drawn = []
    for sampler in (optuna.samplers.RandomSampler(seed=0), optuna.samplers.TPESampler(seed=0)):
        study = optuna.create_study(sampler=sampler)
        for place in range(50):
            trial = study.ask({"task.a": kept})
            study.tell(trial, place % 7)
            drawn.append(trial.params["task.a"])
    own = [distribution.at(generator.random()) for _ in range(200)]
    ends = [value for _, value in distribution.boundary_values()]
    for value in (*map(distribution.normalize, drawn), *own, *ends):
        assert distribution.contains(value)
        stored = kept.to_internal_repr(value)
        assert kept._contains(stored)
        assert kept.to_external_repr(stored) == value


TOO_WIDE: list[dict[str, Any]] = [
    {"uniform": [-1e308, 1e308]},
    {"uniform": [1e308, 1.7e308]},
    {"quniform": [-1e308, 1e308, 1e307]},
    {"loguniform": [1e-200, 1e200]},
    {"int": [0, 2**60 - 1]},
    {"quniform": [0, 1, 1e-9]},
]


@pytest.mark.parametrize("data", TOO_WIDE, ids=str)
def test_wider_ranges_are_refused_once(data: dict[str, Any]) -> None:
    assert len(list(range_faults({"task.a": parse_distribution(data)}, SearchConfig()))) == 1


@pytest.mark.parametrize("sampler", ["gp", "optuna.samplers:GPSampler"])
def test_gp_lists_no_long_range(sampler: str) -> None:
    search = SearchConfig(sampler=sampler)
    (fault,) = range_faults({"task.a": parse_distribution({"int": [1, 10**8]})}, search)
    assert "100,000,000 values" in fault.message
    under = parse_distribution({"int": [1, 10**8], "when": {"task.kind": ["b"]}})
    assert not list(range_faults({"task.a": under}, search))  # GP is not given it


def test_resume_is_checked_for_what_it_changes() -> None:
    long, wide = "{int: [1, 100000000]}", "{int: [0, 1152921504606846975]}"
    before = _resumed(long)
    check_search_changes(before, _resumed(long, "trials=30"), 5)
    for after in (_resumed(wide), _resumed(long, "search.sampler=gp")):
        with pytest.raises(SearchChanged, match=r"space\.task\.width\.int.*(2\*\*53|gp)"):
            check_search_changes(before, after, 5)


def _resumed(width: str, *overrides: str) -> SweepSpec:
    text = f"""
name: ranges
task: digits
metric: val/loss
mode: min
trials: 20
space: {{task.width: {width}}}
"""
    return parse_spec(text, "sweep.yaml", overrides, drawn=5)
