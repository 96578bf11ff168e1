"""Checks of priors against the section `search` and its constraints.

They work on the whole search space. What must not live here: the form of a prior (`priors`).
"""

from __future__ import annotations

from collections.abc import Iterator

from sweeps.config.applied_priors import applied_priors
from sweeps.config.priors import PRIOR
from sweeps.config.search_space import SearchSpace
from sweeps.config.sections import SearchConfig
from sweeps.errors import Issue

_DRAWS = 1_000
"""Points with all priors, of which one must satisfy the constraints."""


def prior_faults(space: SearchSpace, search: SearchConfig, optimizer: str) -> Iterator[Issue]:
    """Refuse priors that no trial would be drawn around.

    Args:
        space: The search space.
        search: The section `search`.
        optimizer: The name of the optimizer if it is not searched.
    """
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


def prior_cautions(space: SearchSpace) -> list[str]:
    """Return a sentence if no allowed point has all priors.

    Args:
        space: The search space.
    """
    known = {key: one.prior.value for key, one in space.distributions.items() if one.prior}
    if not known or space.draw(0, known, attempts=_DRAWS) is not None:
        return []
    return [
        "search.constraints forbid the priors together, so no trial has them all: trials are "
        "drawn near them only where the constraints hold; move a prior, or change the constraints"
    ]
