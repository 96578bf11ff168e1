"""Is the budget of a trial too small or too large?

What must not live here: reading the trials' curves (`read`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import fmean, median, stdev
from typing import Any

from sweeps.formatting import counted
from sweeps.statistics.proportions import binomial_tail
from sweeps.trust.audit.card import RUN_MORE, Card
from sweeps.trust.audit.data import AuditData, AuditTrial, top_fifth

_card = partial(Card, "budget", "Is the budget of a trial too small or too large?")
_FEWEST = 3
"""Leaders that ran to the end."""
_FEWEST_REPORTS = 5
_CHANCE = 0.05
_LEAST_GAIN = 0.01
"""The part of a curve's whole gain that its last tenth must bring to count as not yet ended."""


def budget(data: AuditData) -> Card:
    """Warn if the best report of most leaders is the last one, or in the first half."""
    whole = [t for t in data.ranked if _is_whole(data, t)]
    leaders = top_fifth(whole) if len(whole) >= 5 * _FEWEST else whole[:_FEWEST]
    count, reports, word = len(leaders), data.reports, data.word
    if reports < _FEWEST_REPORTS:
        why = f"a budget of {counted(reports, word)} is shorter than {_FEWEST_REPORTS}."
        return _card("does not apply", why)
    if count < _FEWEST:
        text = f"Trials that ran all {reports} {word}s: {len(whole)}; the card needs {_FEWEST}."
        return _card("not enough data", text, remedy=RUN_MORE)
    bests = {t.number: _best_report(data, t) for t in leaders}
    last = sum(best == reports for best in bests.values())
    early = sum(best <= reports // 2 for best in bests.values())
    gain, error = _last_gain(data, whole)
    figure: dict[str, Any] = {
        "num_leaders": count,
        "num_trials": len(whole),
        "best_reports": {str(number): best for number, best in bests.items()},
        "num_last": last,
        "num_first_half": early,
        "gain_of_last_tenth": gain,
        "standard_error": error,
    }
    said = f"of the {count} best among {len(whole)} trials that ran all {reports} {word}s"
    # A curve that has ended has its best report anywhere in its flat half, by chance.
    by_chance = binomial_tail(last, count, 2 / reports)
    if 2 * last > count and by_chance < _CHANCE and gain > max(_LEAST_GAIN, 2 * error):
        text = (
            f"The last {word} is the best one for {last} {said}; the last tenth of the {word}s "
            f"brought {gain:.0%} of what the whole training gained."
        )
        remedy = f"start a sweep with {2 * reports} {word}s"
        return _card("warn", text, figure, remedy, _command(data, 2 * reports))
    if 2 * early > count and binomial_tail(early, count, 0.25) < _CHANCE:
        enough = min(reports - 1, math.ceil(1.2 * max(bests.values())))
        text = f"The best {word} is in the first half for {early} {said}."
        remedy = f"start a sweep with {enough} {word}s, or set early_stopping.patience"
        return _card("warn", text, figure, remedy, _command(data, enough))
    middle = median(bests.values())
    text = (
        f"The best {word} is the last one for {last}, and in the first half for {early}, {said}; "
        f"the median is {word} {middle:g}."
    )
    return _card("pass", text, figure)


def _is_whole(data: AuditData, trial: AuditTrial) -> bool:
    return trial.state == "complete" and trial.end >= data.reports and not trial.diverged


def _best_report(data: AuditData, trial: AuditTrial) -> int:
    """Return the earliest report with the best value."""
    return min(trial.curve, key=lambda at: (data.loss(trial.curve[at]), at))


def _last_gain(data: AuditData, trials: Sequence[AuditTrial]) -> tuple[float, float]:
    """Return which part of the whole gain the last tenth of the budget brought, and its error."""
    before = data.reports - max(1, round(0.1 * data.reports))
    gains = []
    for trial in trials:
        first, until, end = (
            data.loss(trial.curve.get(at, math.nan))
            for at in (min(trial.curve), before, data.reports)
        )
        best = min(map(data.loss, trial.curve.values()))
        if math.isfinite(until) and first > best:
            gains.append((until - end) / (first - best))
    if len(gains) < 2:
        return 0.0, 0.0
    # Of all whole trials: the best are chosen by their last values, so these are too good.
    return fmean(gains), stdev(gains) / math.sqrt(len(gains))


def _command(data: AuditData, reports: int) -> list[str] | None:
    return ["init", "-s", f"budget.epochs={reports}"] if data.word == "epoch" else None
