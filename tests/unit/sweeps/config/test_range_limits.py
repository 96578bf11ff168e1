"""A value that a range draws is in it, and comes back from a study as it was, up to the limits."""

from __future__ import annotations

import random
from typing import Any

import optuna
import pytest

from sweeps.config.range_checks import range_faults
from sweeps.config.sections import SearchConfig
from sweeps.config.space_parser import parse_distribution

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


@pytest.mark.parametrize("data", AT_THE_LIMITS, ids=str)
def test_values_survive_a_study(data: dict[str, Any]) -> None:
    distribution = parse_distribution(data)
    assert not list(range_faults({"task.a": distribution}, SearchConfig()))
    kept, generator = distribution.to_optuna(), random.Random(0)
    sampler = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(sampler=sampler)
    drawn = [study.ask({"task.a": kept}).params["task.a"] for _ in range(200)]
    own = [distribution.at(generator.random()) for _ in range(200)]
    ends = [value for _, value in distribution.boundary_values()]
    for value in (*map(distribution.normalize, drawn), *own, *ends):
        assert distribution.contains(value)
        stored = kept.to_internal_repr(value)
        assert kept._contains(stored)
        assert kept.to_external_repr(stored) == value
