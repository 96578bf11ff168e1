"""The protocol's space in ConfigSpace, which several peers use; runs in their environments."""

from __future__ import annotations

from typing import Any

import ConfigSpace

from tests.bench.field.programs.serve import plain


def config_space(problem: dict[str, Any]) -> Any:
    """Return the space of a problem, with its seed."""
    space = ConfigSpace.ConfigurationSpace(seed=problem["seed"])
    for name, one in problem["space"].items():
        if one["kind"] == "choice":
            space.add(ConfigSpace.CategoricalHyperparameter(name, one["choices"]))
            continue
        kind = {
            "float": ConfigSpace.UniformFloatHyperparameter,
            "int": ConfigSpace.UniformIntegerHyperparameter,
        }[one["kind"]]
        space.add(kind(name, lower=one["low"], upper=one["high"], log=one["log"]))
    return space


def params(configuration: Any) -> dict[str, Any]:
    """Return the values of a configuration."""
    return {name: plain(value) for name, value in dict(configuration).items()}
