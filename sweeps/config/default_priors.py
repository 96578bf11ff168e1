"""The defaults of optimizers as weak priors: `search: {priors: defaults}`.

A parameter of the optimizer that is searched, and that has no prior of its own, gets as prior the
value that it has when it is left out, with a wide width. What must not live here: priors that a
user writes (`priors`), and the defaults of learning rates and the like (`trainable.config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweeps.config.priors import Prior
from sweeps.config.space import Choice, Distribution
from trainable.config import OPTIMIZER_DEFAULTS

OPTIMIZER = "train.optimizer.name"
WIDE = 0.25
"""The width of a default's prior: for a rate over four powers of ten, one power of ten."""
_SECTION = "train.optimizer."
_BETAS = {name: [0.9, 0.999] for name in ("adam", "adamw", "adamax", "nadam", "radam", "lamb")}
_BETAS["lion"] = [0.9, 0.99]
_WITH_MOMENTUM = ("sgd", "rmsprop", "muon")


def default_prior(key: str, distribution: Distribution, optimizer: str) -> Prior | None:
    """Return the prior that an optimizer's default is; None if the range does not have it.

    Args:
        key: The parameter.
        distribution: Its distribution.
        optimizer: The name of the optimizer.
    """
    defaults = _defaults(optimizer)
    option = key.removeprefix(_SECTION)
    if not key.startswith(_SECTION) or option not in defaults:
        return None
    value = defaults[option]
    return Prior(distribution.normalize(value), WIDE) if distribution.contains(value) else None


def priors_by_optimizer(
    space: Mapping[str, Distribution], optimizer: str, *, with_defaults: bool
) -> dict[tuple[str, str], Prior]:
    """Return all priors of a space, by parameter and name of the optimizer.

    Args:
        space: The distributions.
        optimizer: The optimizer if it is not searched.
        with_defaults: Whether defaults of optimizers are priors; see `search.priors`.
    """
    searched = space.get(OPTIMIZER)
    names = searched.options if isinstance(searched, Choice) else [optimizer]
    found = {
        (key, str(name)): one.prior or default_prior(key, one, str(name))
        for key, one in space.items()
        for name in names
        if one.prior or with_defaults
    }
    return {key: prior for key, prior in found.items() if prior is not None}


def _defaults(optimizer: str) -> Mapping[str, Any]:
    known = OPTIMIZER_DEFAULTS.get(optimizer)
    if known is None:
        return {}  # of a user's class
    found: dict[str, Any] = {"lr": known.lr, "weight_decay": known.weight_decay}
    if optimizer in _BETAS:
        found["betas"] = _BETAS[optimizer]
    if optimizer in _WITH_MOMENTUM:
        found["momentum"] = known.momentum
    return found
