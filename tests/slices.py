"""Slices of long tables of cases: `make test` runs a part, `make chaos` the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def sliced(cases: Iterable[Any], runs: Callable[[Any], bool]) -> list[ParameterSet]:
    """Leave the cases for which `runs` does not hold to `make chaos`; a tuple is a row."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if runs(case) else pytest.mark.chaos,
        )
        for case in cases
    ]


def samplers(*names: str) -> list[ParameterSet]:
    """Run tpe, and cmaes, which keeps a state of its own; leave the others to `make chaos`."""
    return sliced(names, ("tpe", "cmaes").__contains__)
