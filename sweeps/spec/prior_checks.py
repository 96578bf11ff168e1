"""Checks of priors against the section `search` and its constraints.

They work on the whole search space. What must not live here: the form of a prior (`priors`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sweeps.errors import Issue
from sweeps.spec.applied_priors import OPTIMIZER, applied_priors, default_prior
from sweeps.spec.priors import PRIOR
from sweeps.spec.search_space import SearchSpace
from sweeps.spec.sections import SearchConfig
from sweeps.spec.space import Choice

_DRAWS = 1_000
"""Points with all priors, of which one must satisfy the constraints."""


def prior_faults(space: SearchSpace, search: SearchConfig, optimizer: str) -> Iterator[Issue]:
    """Refuse priors that no trial would be drawn around."""
    own = [key for key, one in space.distributions.items() if one.prior is not None]
    if search.sampler == "grid":
        rule = "grid tries every value in a fixed order, so that a prior would change nothing"
        fix = "write another sampler, such as tpe"
        for key in own:
            message = f"{rule}; leave it out, or {fix}"
            yield Issue(("space", key, PRIOR), message, at_key=True)
        if search.priors is not None:
            yield Issue(("search", "priors"), f"{rule}; leave it out, or {fix}", at_key=True)
    elif search.priors == "defaults":
        found = applied_priors(space.distributions, optimizer, with_defaults=True)
        if all(prior.default_of is None for prior in found):
            yield Issue(
                ("search", "priors"),
                "no searched parameter without a prior of its own has its optimizer's default in "
                "its range, so that this would change nothing; defaults are those of lr, "
                "weight_decay, betas and momentum; widen a range, write "
                "prior: VALUE beside a distribution, or leave this out",
            )


def prior_cautions(space: SearchSpace, search: SearchConfig, optimizer: str) -> list[str]:
    """Return a sentence if no allowed point has all priors, with one of the optimizers."""
    own = {key: one.prior.value for key, one in space.distributions.items() if one.prior}
    searched = space.distributions.get(OPTIMIZER)
    names = [str(own.get(OPTIMIZER, optimizer))]
    if search.priors == "defaults" and OPTIMIZER not in own and isinstance(searched, Choice):
        names = list(map(str, searched.options))
    forbidden = [name for name in names if not _may_have_all(space, search, own, name)]
    if not forbidden:
        return []
    where = f" with {', '.join(forbidden)}" if len(names) > 1 else ""
    return [
        f"search.constraints forbid the priors together{where}, so no trial has them all: trials "
        "are drawn near them only where the constraints hold; move a prior, or change the "
        "constraints"
    ]


def _may_have_all(
    space: SearchSpace, search: SearchConfig, own: Mapping[str, Any], optimizer: str
) -> bool:
    """Return whether an allowed point has all priors of an optimizer, or it has none."""
    priors = dict(own)
    if search.priors == "defaults":
        for key, one in space.distributions.items():
            default = default_prior(key, one, optimizer)
            if key not in own and default is not None:
                priors[key] = default.value
    if not priors:
        return True
    if OPTIMIZER in space.distributions:
        priors.setdefault(OPTIMIZER, optimizer)
    return space.draw(0, priors, attempts=_DRAWS) is not None
