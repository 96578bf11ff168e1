"""All priors of a sweep: those beside the distributions, and the defaults of its optimizers.

What must not live here: the form of a prior (`priors`), what the defaults are (`default_priors`),
and which trials take their points from priors (`sweeps.search.prior_trials`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sweeps.formatting import format_value
from sweeps.spec.default_priors import default_prior
from sweeps.spec.priors import Prior
from sweeps.spec.space import Choice, Distribution

OPTIMIZER = "train.optimizer.name"


@dataclass(frozen=True)
class AppliedPrior:
    """The prior of one parameter.

    Attributes:
        key: The parameter.
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
