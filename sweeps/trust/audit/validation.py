"""Is the validation set large enough for the differences that it decides?

By what the search gained over its first trials: a sampler that learns brings the best trials as
near to each other as it can, and no set is large enough for their distances. What must not live
here: the size of the validation set (`read`).
"""

from __future__ import annotations

import math
import re
from functools import partial
from statistics import median
from typing import Any

from sweeps.formatting import format_number
from sweeps.statistics.proportions import wilson_interval
from sweeps.trust.audit.card import RUN_MORE, Card
from sweeps.trust.audit.data import AuditData

_card = partial(Card, "validation", "Is the validation set large enough?")
_FEWEST = 10
_FIRST = 10
"""Trials that a sampler drew before it had learned."""
_PART = 1 / 3
"""Chance may make differences of so large a part of what the search gained."""
_SHARES = re.compile("accuracy|acc|top1|top5|error|err")
"""Words in the names of metrics that count samples."""
_Z = 1.96


def validation(data: AuditData) -> Card:
    """Warn if chance on the validation set makes a third of what the search gained."""
    ranked = data.ranked
    if not is_share(data.metric):
        return _card("does not apply", f"{data.metric} is no share of right answers.")
    count = data.num_validation
    if not count:
        if not ranked:
            return _card("not enough data", "No trial has a result.", remedy=RUN_MORE)
        return _card("does not apply", "the number of validation samples is not recorded.")
    values = [t.value or 0.0 for t in ranked]
    unit = 100.0 if any(value > 1 for value in values) else 1.0
    values = [value / unit for value in values]
    if len(values) < _FEWEST or not all(0 <= value <= 1 for value in values):
        text = f"Trials with a share from 0 to 1: {len(values)}; the card needs {_FEWEST}."
        return _card("not enough data", text, remedy=RUN_MORE)
    best = values[0]
    low, high = wilson_interval(best * count, count)
    report, losses = data.comparable()
    first = [losses[number] for number in sorted(losses)[:_FIRST]]
    gained = (median(first) - min(losses.values())) / unit
    gap = _PART * gained
    middle = best + gap if data.minimize else best - gap
    # The gap of two shares, each of `count` samples, that is larger than chance makes it.
    visible = _Z * math.sqrt((best * (1 - best) + middle * (1 - middle)) / count)
    within = sum(low <= value <= high for value in values) - 1
    figure: dict[str, Any] = {
        "num_validation": count,
        "num_trials": len(values),
        "report": report,
        "gained": gained,
        "best": best,
        "low": low,
        "high": high,
        "gap": gap,
        "least_visible_gap": visible,
        "num_within": within,
    }
    at = f" by {data.word} {report}" if 0 < report < data.reports else ""
    evidence = (
        f"The best {data.metric}, {format_number(best)} of {count:,} samples, has the 95 % "
        f"interval {format_number(low)} to {format_number(high)}, and {within} of "
        f"{len(values) - 1} other trials lie in it. The search gained {format_number(gained)} "
        f"over the median of its first {len(first)} trials{at}. So many samples show differences "
        f"from {format_number(visible)}; a third of the gain is {format_number(gap)}."
    )
    if gap >= visible:
        return _card("pass", evidence, figure)
    enough = _enough(best, middle, gap)
    samples = f"about {enough:,} validation samples" if enough else "more validation samples"
    remedy = f"take {samples}, or a metric that does not count, such as val/loss"
    return _card("warn", evidence, figure, remedy)


def is_share(metric: str) -> bool:
    """Whether a metric's name says that it is a share of samples."""
    words = re.split(r"[^a-z0-9]+", metric.rpartition("/")[2].lower())
    return any(map(_SHARES.fullmatch, words))


def _enough(best: float, middle: float, gap: float) -> int | None:
    """Return how many samples would show a gap; None if the gap is 0."""
    if gap <= 0:
        return None
    exact = (best * (1 - best) + middle * (1 - middle)) * (_Z / gap) ** 2
    return int(float(f"{exact:.1g}")) or None
