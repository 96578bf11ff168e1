"""Has the search converged: what would twice as many trials bring?

What must not live here: the estimates (`sweeps.statistics.best_of_many`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from sweeps.formatting import format_number
from sweeps.results.audit.card import Card
from sweeps.results.audit.data import AuditData
from sweeps.statistics.best_of_many import doubling, tuning_curve

_card = partial(Card, "convergence", "Has the search converged?")
_FEWEST = 24
_FEWEST_WITHOUT_SEEDS = 60
"""Of trials whose noise is unknown: of fewer, chance alone makes gains that look large."""
_LARGE = 0.05
"""A gain is worth twice the trials if it is at least this part of what the search gained."""
_SURELY, _SURELY_WITHOUT_SEEDS = 0.01, 0.02
"""And if it is surely at least this part."""


def convergence(data: AuditData) -> Card:
    """Warn if twice as many trials are expected to improve the best value noticeably."""
    compared = _compared(data)
    values, count = sorted(compared.losses), len(compared.losses)
    floor = data.noise_floor
    fewest = _FEWEST_WITHOUT_SEEDS if floor is None else _FEWEST
    if count < fewest:
        text = f"{count} trials have a result; the card needs {fewest}"
        if floor is None:
            text += f", or {_FEWEST} if the noise of seeds is known, as after sweep confirm"
        return _card("not enough data", f"{text}.", remedy="run more trials")
    if flat := data.all_equal(values):
        return _card("not enough data", flat)
    gained = median(values) - values[0]
    if gained <= 0:
        text = f"The better half of {count} trials have the same value."
        return _card("pass", text, {"num_trials": count})
    more = doubling(values)
    late = 0.0 if data.random_search else _late_gain(compared.losses)
    figure: dict[str, Any] = {
        "num_trials": count,
        "report": compared.report,
        "expected_gain": more.gain,
        "share_of_gain": more.share,
        "low": more.low,
        "high": more.high,
        "gain_of_second_half": None if data.random_search else late,
        "noise_floor": None if floor is None else floor.sd,
        "curve": [_point(data, one._asdict()) for one in tuning_curve(values)],
    }
    evidence = (
        f"The best of {count} trials{compared.words} is {format_number(gained)} better than their "
        f"median. Twice as many trials are expected to gain {format_number(more.gain)} more, "
        f"{more.share:.1%} of that ({more.low:.1%} to {min(more.high, 1):.1%})"
    )
    if not data.random_search:
        evidence += (
            f", if the sampler learned nothing more; the second half of the trials gained "
            f"{format_number(late)} ({late / gained:.1%})"
        )
    evidence += "."
    if floor is not None and max(more.gain, late) < floor.sd:
        noise = format_number(floor.sd)
        text = f"{evidence} That is less than the standard deviation over seeds, {noise}."
        return _card("pass", text, figure)
    surely = _SURELY_WITHOUT_SEEDS if floor is None else _SURELY
    if (more.share > _LARGE and more.low > surely) or late > _LARGE * gained:
        changes = data.overrides((), ())
        words = [word for change in changes for word in ("-s", change)]
        command = ("resume", *words) if words else None
        return _card("warn", evidence, figure, "run more trials", command)
    if more.share <= _LARGE:
        return _card("pass", evidence, figure)
    text = f"{evidence} The interval is too wide to tell."
    return _card("not enough data", text, figure, "run more trials")


class _Compared(NamedTuple):
    """Losses that can be compared, in the order of the trials."""

    losses: Sequence[float]
    words: str
    report: int = 0
    """The report by which they are compared; 0: at the end of each trial."""


def _compared(data: AuditData) -> _Compared:
    """Return the losses of all trials, if none was stopped, or of those that ran to the end.

    If these are too few, all trials are compared at the last report that each of them made: the
    values of a stopped trial and of one that trained longer are no sample of one distribution.
    """
    counted = [t for t in data.trials if t.counts and t.value is not None]
    counted = [t for t in counted if math.isfinite(t.value or 0.0)]
    whole = [data.loss(t.value or 0.0) for t in counted if t.state == "complete"]
    if len(whole) == len(counted):
        return _Compared(whole, "")
    if len(whole) >= _FEWEST:
        return _Compared(whole, " that ran to the end")
    report, losses = data.comparable()
    return _Compared([*losses.values()], f" by {data.word} {report}", report)


def _late_gain(losses: Sequence[float]) -> float:
    """Return by how much the second half of the trials improved the best value of the first.

    A sampler that learns gains more than independent trials would.
    """
    half = len(losses) // 2
    return max(0.0, min(losses[:half]) - min(losses[half:]))


def _point(data: AuditData, point: dict[str, Any]) -> dict[str, Any]:
    """Return a point of the curve in the unit and direction of the metric."""
    for key in ("expected", "low", "high"):
        if point[key] is not None:
            point[key] = data.loss(point[key])
    if not data.minimize:
        point["low"], point["high"] = point["high"], point["low"]
    return point
