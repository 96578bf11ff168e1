"""The values of configurations that were trained under several seeds, and what they differ by.

What must not live here: which configuration is the best (`extra_training`), and the formulas
(`statistics.common_seeds`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from sweeps.view.sweep_status import SweepStatus

_LEVEL = 0.05


def seed_values(view: SweepStatus) -> Mapping[int, Mapping[int, float]]:
    """Return the values under several seeds, by the search's trial and the common seed.

    Of extra trials they are those that the last series compares.
    """
    found: dict[int, dict[int, float]] = {}
    # Extra trials and repeats have common seeds of their own: never the same.
    for record in view.records:
        value = record.own_value
        if record.role not in ("search", "repeat") or record.seed_index is None or value is None:
            continue
        if record.state == "complete":
            found.setdefault(record.search_number, {})[2 * record.seed_index] = value
    if view.series_result is not None:
        for number, values in view.series_result.compared.items():
            again = {2 * index + 1: value for index, value in enumerate(values)}
            found.setdefault(number, {}).update(again)
    return found


def chance_difference(view: SweepStatus) -> float | None:
    """Return the difference that seeds alone make of two equal configurations, or less.

    It is exceeded in 5 of 100 pairs. The difference of two values, each the mean over the seeds
    of the search, has the variance `2 sd**2 / seeds`. None if no configuration was trained under
    several seeds.
    """
    from sweeps.statistics.common_seeds import half_width, noise_floor, table_of  # slow to import

    values = seed_values(view)
    floor = noise_floor(table_of(values)) if values else None
    if floor is None:
        return None
    error = floor.sd * math.sqrt(2 / view.spec.repeats.seeds)
    return half_width(error, floor.freedom, _LEVEL)
