"""The defaults of optimizers as weak priors: `search: {priors: defaults}`.

A parameter of the optimizer that is searched, and that has no prior of its own, gets as prior the
value that it has when it is left out, with a wide width. What must not live here: priors that a
user writes (`priors`), and the defaults of learning rates and the like (`trainable.config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sweeps.spec.priors import Prior
from sweeps.spec.space import Distribution
from trainable.config import OPTIMIZER_DEFAULTS

WIDE = 0.25
"""The width of a default's prior: for a rate over four powers of ten, one power of ten."""
_SECTION = "train.optimizer."
# Torch's, and those of the packages that have LAMB and Lion. Reading a spec does not import
# torch, so a test compares them with the signatures.
_BETAS = {name: [0.9, 0.999] for name in ("adam", "adamw", "adamax", "nadam", "radam", "lamb")}
_BETAS["lion"] = [0.9, 0.99]
_WITH_MOMENTUM = ("sgd", "rmsprop", "muon")
_WITHOUT_DECAY = ("rprop",)


def default_prior(key: str, distribution: Distribution, optimizer: str) -> Prior | None:
    """Return the prior that an optimizer's default is; None if the range does not have it."""
    defaults = optimizer_defaults(optimizer)
    option = key.removeprefix(_SECTION)
    if not key.startswith(_SECTION) or option not in defaults:
        return None
    value = defaults[option]
    return Prior(distribution.normalize(value), WIDE) if distribution.contains(value) else None


def optimizer_defaults(optimizer: str) -> Mapping[str, Any]:
    """Return an optimizer's value of each option left out; nothing for a user's class."""
    known = OPTIMIZER_DEFAULTS.get(optimizer)
    if known is None:
        return {}
    found: dict[str, Any] = {"lr": known.lr}
    if optimizer not in _WITHOUT_DECAY:
        found["weight_decay"] = known.weight_decay
    if optimizer in _BETAS:
        found["betas"] = _BETAS[optimizer]
    if optimizer in _WITH_MOMENTUM:
        found["momentum"] = known.momentum
    return found
