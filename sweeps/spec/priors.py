"""Priors: where in the range of a parameter the user expects good values.

    {loguniform: [1.0e-5, 1.0], prior: 3.0e-4}
    {loguniform: [1.0e-5, 1.0], prior: 3.0e-4, prior_width: 0.05}
    {choice: [sgd, adamw], prior: adamw}

What must not live here: which trials take their points from priors (`sweeps.search.prior_trials`),
and the defaults of optimizers as priors (`applied_priors`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sweeps.errors import Issue, UserError
from sweeps.spec.yaml_scalars import write_flow, written

if TYPE_CHECKING:
    from sweeps.spec.space import Distribution

PRIOR, PRIOR_WIDTH = "prior", "prior_width"
"""The keys beside a distribution."""
WIDTH = 0.1
"""The width of a prior that has none of its own."""


@dataclass(frozen=True)
class Prior:
    """A value that is expected to be good, and how sure that is."""

    value: Any
    """As the distribution draws it."""
    width: float = WIDTH
    """The standard deviation of the values that are tried around it, as a share of the range; of a
    choice, how likely another option is tried."""

    def to_data(self, distribution: Distribution) -> dict[str, Any]:
        """Return the keys beside a distribution."""
        data = {PRIOR: distribution.configured(self.value)}
        return data if self.width == WIDTH else data | {PRIOR_WIDTH: self.width}


def parse_prior(data: Mapping[str, Any], distribution: Distribution) -> Prior:
    """Parse the keys beside a distribution."""
    faults = []
    if PRIOR not in data:
        faults.append(
            Issue(
                (PRIOR_WIDTH,),
                "there is no prior; a width says how far good values may be from a prior; write "
                "prior: VALUE beside it, or leave it out",
                True,
            )
        )
    elif not distribution.contains(value := data[PRIOR]):
        faults.append(
            Issue(
                (PRIOR,),
                f"{written(value)} is no value of {distribution}; a prior is a value that the "
                f"parameter may have; {_remedy(value, distribution)}",
            )
        )
    width = data.get(PRIOR_WIDTH, WIDTH)
    wrong = isinstance(width, bool) or not isinstance(width, int | float)
    if wrong or not math.isfinite(width) or not 0 < width <= 1:
        faults.append(
            Issue(
                (PRIOR_WIDTH,),
                f"{written(width)} is not a width; a width is a share of the range, above 0 and "
                f"at most 1; write for example {WIDTH}",
            )
        )
    if faults:
        raise UserError(faults)
    return Prior(distribution.normalize(data[PRIOR]), float(width))


def _remedy(value: object, distribution: Distribution) -> str:
    near = distribution.boundary_values()[0][1]
    if isinstance(value, int | float) and math.isfinite(value):
        with contextlib.suppress(NotImplementedError):  # no option is near to a number
            near = distribution.nearest(value)
    fix = write_flow(distribution.configured(near))
    return f"write a value that it has, such as {fix}, or add yours to it"
