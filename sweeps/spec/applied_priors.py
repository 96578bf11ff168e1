"""All priors of a sweep: those beside the distributions, and the defaults of its optimizers.

With `search: {priors: defaults}`, a searched parameter of the optimizer without a prior of its own
gets its default as prior, with a wide width. What must not live here: the form of a prior
(`priors`), and which trials take their points from priors (`sweeps.search.prior_trials`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeps.formatting import format_value
from sweeps.spec.priors import Prior
from sweeps.spec.space import Choice, Distribution
from trainable.config import OPTIMIZER_DEFAULTS

OPTIMIZER = "train.optimizer.name"


@dataclass(frozen=True)
class AppliedPrior:
    """The prior of one parameter.

    Attributes:
        value: The value that is expected to be good, in the form of a configuration.
        width: How far good values may be from it; see `Prior`.
        default_of: The optimizer whose default it is; None if the user wrote it.
    """

    key: str
    value: Any
    width: float
    default_of: str | None

    def as_dict(self) -> dict[str, Any]:
        """Return the prior for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        source = "" if self.default_of is None else f"default of {self.default_of}, "
        return f"{self.key} {format_value(self.value)} ({source}width {self.width:g})"


def applied_priors(
    space: Mapping[str, Distribution], optimizer: str, *, with_defaults: bool
) -> Sequence[AppliedPrior]:
    """Return all priors of a space, in its order."""
    searched = space.get(OPTIMIZER)
    names = searched.options if isinstance(searched, Choice) else [optimizer]

    def found() -> Iterator[tuple[str, Distribution, Prior | None, str | None]]:
        for key, one in space.items():
            if one.prior is not None:
                yield key, one, one.prior, None
            elif with_defaults:
                allowed = dict(one.when).get(OPTIMIZER, names)
                for name in map(str, names):
                    if name in allowed:
                        yield key, one, default_prior(key, one, name), name

    return [
        AppliedPrior(key, one.configured(prior.value), prior.width, name)
        for key, one, prior, name in found()
        if prior is not None
    ]


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
