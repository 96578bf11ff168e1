"""Is the gap between the best trials larger than the noise of training?

What must not live here: which trial is really the best (`sweep confirm`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from sweeps.formatting import counted, format_number
from sweeps.trust.audit.card import RUN_MORE, Card
from sweeps.trust.audit.data import AuditData

if TYPE_CHECKING:
    from sweeps.statistics.common_seeds import NoiseFloor

_card = partial(Card, "noise", "Is the best trial better than the second, or lucky?")
_LEVEL = 0.05
"""The probability that an interval misses."""


def noise(data: AuditData) -> Card:
    """Compare the gap between the best two trials with the standard deviation over seeds."""
    ranked = data.ranked
    if len(ranked) < 2:
        text = f"Trials with a result: {len(ranked)}; the gap needs two."
        return _card("not enough data", text, remedy=RUN_MORE)
    repeats = {
        number: {seed: value for seed, value in one.items() if math.isfinite(value)}
        for number, one in data.repeats.items()
    }
    floor = data.noise_floor
    if floor is None:
        gap = abs((ranked[0].value or 0.0) - (ranked[1].value or 0.0))
        far = f"are {format_number(gap)} apart in" if gap else "have the same"
        text = (
            f"Trials {ranked[0].number} and {ranked[1].number} {far} "
            f"{data.metric}, each from one {data.seed_word}; no trial was trained with several, "
            "so the noise is unknown."
        )
        remedy = "train the best trials again under other seeds"
        return _card("not enough data", text, {"gap": gap}, remedy, ("confirm",))
    confirmed = sorted(
        (data.loss(fmean(one.values())), number) for number, one in repeats.items() if len(one) > 1
    )
    if len(confirmed) > 1:
        (_, first), (_, second) = confirmed[:2]
        return _by_seeds(data, floor, first, second, repeats[first], repeats[second])
    return _by_floor(data, floor, [ranked[0].number, ranked[1].number])


def _by_seeds(
    data: AuditData,
    floor: NoiseFloor,
    first: int,
    second: int,
    mine: dict[int, float],
    other: dict[int, float],
) -> Card:
    """Compare the means over seeds of the two best trials that have several."""
    from sweeps.statistics.common_seeds import paired_difference, table_of

    values, others = table_of({first: mine, second: other})
    found = paired_difference(values, others, _LEVEL)
    if found is not None:
        num_shared = len(mine.keys() & other.keys())
        from_seeds = counted(num_shared, f"common {data.seed_word}")
        gap, half = abs(found.mean), found.half_width
    else:
        gap = abs(fmean(mine.values()) - fmean(other.values()))
        half = _half_width(floor, 1 / len(mine) + 1 / len(other))
        from_seeds = f"{len(mine)} and {len(other)} {data.seed_word}s"
    evidence = (
        f"The means of trials {first} and {second} over {from_seeds} are {format_number(gap)} "
        f"apart in {data.metric}, with an interval of ±{format_number(half)}; "
        f"{_floor(data, floor)}."
    )
    card = _verdict(floor, gap, half, (first, second), evidence, data.tied)
    if data.tied is None:
        return card
    *others, last = map(str, data.tied)
    apart = f"trials {', '.join(others)} and {last} cannot be told apart"
    said = apart if others else f"trial {last} is better than the other leaders"
    return replace(
        card,
        evidence=f"{evidence} By the confirmation, which compares all leaders at once, {said}.",
        figure={**card.figure, "tied": list(data.tied)},
    )


def _by_floor(data: AuditData, floor: NoiseFloor, numbers: Sequence[int]) -> Card:
    """Compare the values of the two best trials, each from one seed."""
    first, second = (t for t in data.ranked if t.number in numbers)
    gap = abs((first.value or 0.0) - (second.value or 0.0))
    half = _half_width(floor, 2)
    evidence = (
        f"Trials {first.number} and {second.number} are {format_number(gap)} apart in "
        f"{data.metric}, each from one {data.seed_word}; a difference up to "
        f"{format_number(half)} may come from the {data.seed_word}s alone (95 %); "
        f"{_floor(data, floor)}."
    )
    return _verdict(floor, gap, half, (first.number, second.number), evidence)


def _half_width(floor: NoiseFloor, variances: float) -> float:
    """Return half the interval of a gap whose variance is so many times that of one value."""
    from sweeps.statistics.common_seeds import half_width

    return half_width(floor.sd * math.sqrt(variances), floor.freedom, _LEVEL)


def _verdict(
    floor: NoiseFloor,
    gap: float,
    half: float,
    trials: tuple[int, int],
    evidence: str,
    tied: Sequence[int] | None = None,
) -> Card:
    figure = {
        "trials": list(trials),
        "gap": gap,
        "least_visible_gap": half,
        "noise_floor": floor.sd,
        "num_configurations": floor.num_configurations,
        "num_values": floor.num_values,
        "freedom": floor.freedom,
    }
    # Two tests of the same seeds may differ; a confirmation has the last word.
    if gap > half if tied is None else len(tied) == 1:
        return _card("pass", evidence, figure)
    remedy = (
        f"train trials {trials[0]} and {trials[1]} under more seeds, or take trial {trials[0]}"
    )
    return _card("warn", evidence, figure, remedy, ("confirm", "--seeds", "10"))


def _floor(data: AuditData, floor: NoiseFloor) -> str:
    return (
        f"the standard deviation over {data.seed_word}s of one configuration is "
        f"{format_number(floor.sd)} (from {floor.num_values} values of "
        f"{counted(floor.num_configurations, 'configuration')})"
    )
