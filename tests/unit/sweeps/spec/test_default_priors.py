"""Defaults of optimizers as priors are what the optimizers have."""

from __future__ import annotations

import inspect

import pytest

from sweeps.spec.applied_priors import optimizer_defaults
from trainable.config import OPTIMIZER_DEFAULTS, OptimizerConfig
from trainable.optim import class_of

_OWN = {
    ("sgd", "lr"): 0.1,
    ("sgd", "momentum"): 0.9,
    ("adam", "lr"): 3e-4,
    ("adamw", "lr"): 3e-4,
    ("lion", "lr"): 3e-4,
    ("adafactor", "lr"): 1e-3,
    ("lamb", "lr"): 1e-3,
}
"""Where a spec has a default of its own in place of the class's."""
_OPTIONS = {"lr", "weight_decay", "betas", "momentum"}


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
def test_default_is_that_of_the_signature(name: str) -> None:
    known = inspect.signature(class_of(OptimizerConfig(name=name))).parameters
    theirs = {key: known[key].default for key in known.keys() & _OPTIONS}
    ours = {key: _OWN.get((name, key), value) for key, value in theirs.items()}
    if "betas" in ours:
        ours["betas"] = list(ours["betas"])
    assert optimizer_defaults(name) == ours


@pytest.mark.parametrize("name", OPTIMIZER_DEFAULTS)
def test_default_is_what_a_trial_has_without_the_key(name: str) -> None:
    config = OptimizerConfig(name=name)
    for key, value in optimizer_defaults(name).items():
        own = getattr(config, key)  # null betas are the class's
        assert own == value or (key == "betas" and own is None)


def test_class_of_a_user_has_no_defaults_here() -> None:
    assert optimizer_defaults("my_package:MyOptimizer") == {}
