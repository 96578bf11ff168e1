"""Does early stopping stop the right trials?

Only trials that run to the end whatever the rule says (`early_stopping.exempt`) show without bias
how a rung's order and the last one agree: the survivors of a rung are alike, so their ranks agree
less. What must not live here: the rules (`stopping`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from sweeps.formatting import counted
from sweeps.statistics.proportions import FEWEST, RankCorrelation, kendall, wilson_interval
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.data import AuditData, AuditTrial

_card = partial(Card, "stopping", "Does early stopping stop the right trials?")
_SOUND = 0.6
"""A rung agrees with the end if tau may be so large: four of five pairs in the right order."""
_LEAST = 0.2
"""And it is known to agree if tau is at least this: three of five pairs in the right order."""


def stopping(data: AuditData) -> Card:
    """Compare the order of trials at each rung with their order at the end."""
    stopped = sum(t.stopped_early for t in data.trials)
    if not data.rungs:
        return _card("does not apply", "no rule stops trials at rungs.")
    if not data.can_exempt:
        why = (
            "trials of a function cannot be exempt from early stopping, and others are survivors."
        )
        return _card("does not apply", why)
    ends = {t.number: value for t in data.trials if (value := _end(data, t)) is not None}
    exempt = [t for t in data.trials if t.exempt and t.number in ends]
    unbiased = len(exempt) >= FEWEST
    compared = exempt if unbiased else [t for t in data.trials if t.number in ends]
    rungs = {r: found for r in data.rungs if (found := _tau(data, compared, ends, r))}
    wrong = _wrong_stops(data, exempt, ends)
    figure = {
        "num_exempt": len(exempt),
        "num_to_end": len(ends),
        "num_stopped": stopped,
        "rungs": {str(rung): one._asdict() for rung, one in rungs.items()},
        "wrong_stops": wrong,
    }
    shown = "; ".join(
        f"{data.word} {rung}: {one.tau:.2f} ({one.low:.2f} to {one.high:.2f})"
        for rung, one in rungs.items()
    )
    taus = (
        "How well the order at a rung agrees with the one at the end (Kendall's tau, at most 1), "
        f"from {counted(len(compared), 'trial')}: {shown}."
        if rungs
        else ""
    )
    if not unbiased:
        return _biased(data, len(exempt), len(compared), taus, figure)
    evidence = f"{taus} {_wrong_sentence(data, wrong)}".strip()
    bad = [rung for rung, one in rungs.items() if one.high < _SOUND]
    if bad:
        later = _later(data, rungs)
        return _card(
            "warn",
            evidence,
            figure,
            f"start a sweep whose first rung is later: {counted(later, data.word)} or more",
            ("init", "-s", f"early_stopping.grace_epochs={later}"),
        )
    if rungs and all(one.low > _LEAST for one in rungs.values()):
        return _card("pass", evidence, figure)
    text = f"{evidence} The intervals are too wide to tell."
    return _card("not enough data", text, figure, "let more trials be exempt")


def _end(data: AuditData, trial: AuditTrial) -> float | None:
    """Return a trial's loss at the end of its budget; None if it did not get there."""
    if trial.finished_value is not None:
        return data.loss(trial.finished_value)
    if trial.state != "complete" or trial.end < data.reports:
        return None
    value = trial.value
    return None if value is None or not math.isfinite(value) else data.loss(value)


def _at(data: AuditData, trial: AuditTrial, rung: int) -> float | None:
    value = trial.curve.get(rung)
    return None if value is None or not math.isfinite(value) else data.loss(value)


def _tau(
    data: AuditData, trials: Sequence[AuditTrial], ends: dict[int, float], rung: int
) -> RankCorrelation | None:
    pairs = [(x, ends[t.number]) for t in trials if (x := _at(data, t, rung)) is not None]
    level = 1 - 0.05 / len(data.rungs)  # Bonferroni: one of all rungs may be wrong in 5 %
    return kendall([x for x, _ in pairs], [y for _, y in pairs], level) if pairs else None


def _wrong_stops(
    data: AuditData, exempt: Sequence[AuditTrial], ends: dict[int, float]
) -> dict[str, dict[str, float]]:
    """Estimate, for each rung, the share of the trials stopped there that is stopped wrongly.

    An exempt trial would have been stopped at a rung if it is not in the best 1/`reduction` of all
    trials that got there. That is wrong if it ended in the best 1/`reduction` of the exempt ones.
    A rule that stopped at random would be wrong in 1/`reduction` of its stops.
    """
    found = {}
    kept = max(1, len(exempt) // data.reduction)
    good = {t.number for t in sorted(exempt, key=lambda t: ends[t.number])[:kept]}
    for rung in data.rungs:
        there = sorted(x for t in data.trials if (x := _at(data, t, rung)) is not None)
        if not there:
            continue
        bar = there[max(1, math.ceil(len(there) / data.reduction)) - 1]
        stopped = {t.number for t in exempt if (x := _at(data, t, rung)) is not None and x > bar}
        if stopped:
            wrong = len(stopped & good)
            low, high = wilson_interval(wrong, len(stopped))
            found[str(rung)] = {
                "num_wrong": wrong,
                "num_would_stop": len(stopped),
                "share": wrong / len(stopped),
                "low": low,
                "high": high,
            }
    return found


def _wrong_sentence(data: AuditData, wrong: dict[str, dict[str, float]]) -> str:
    if not wrong:
        return ""
    rung, worst = max(wrong.items(), key=lambda item: item[1]["share"])
    return (
        f"At {data.word} {rung} the rule would have stopped {worst['num_would_stop']} exempt "
        f"trials, of which {worst['num_wrong']} ended in the best 1/{data.reduction}: "
        f"{worst['share']:.0%} of its stops are wrong ({worst['low']:.0%} to {worst['high']:.0%})."
    )


def _biased(
    data: AuditData, exempt: int, compared: int, taus: str, figure: dict[str, Any]
) -> Card:
    text = (
        f"Trials exempt from early stopping: {exempt}; the card needs {FEWEST}. "
        f"{f'{taus} These ' if taus else f'Trials that ran to the end ({compared}) '}"
        "are survivors, which are alike at the rungs and agree less than all trials would."
        if compared
        else f"No trial ran to the end of {counted(data.reports, data.word)}."
    )
    return _card(
        "not enough data",
        text,
        figure,
        "let a random few trials run to the end",
        ("init", "-s", "early_stopping.exempt=0.1"),
    )


def _later(data: AuditData, rungs: dict[int, RankCorrelation]) -> int:
    """Return the first rung that agrees with the end, else half of the budget."""
    good = [rung for rung, one in rungs.items() if one.high >= _SOUND and one.tau >= _SOUND]
    after = [
        rung for rung in good if all(rung > bad for bad, o in rungs.items() if o.high < _SOUND)
    ]
    return min(after, default=max(1, data.reports // 2))
