"""Which parameters have no effect, and which act only together?

What must not live here: the estimate (`sweeps.statistics.variance_shares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sweeps.formatting import listed
from sweeps.spec.space import Choice, Distribution, is_number
from sweeps.spec.yaml_scalars import write_flow
from sweeps.statistics.variance_shares import Share, VarianceShares, variance_shares
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.data import AuditData
from sweeps.trust.evidence import place, rank_effects

_card = partial(Card, "effects", "Does each searched parameter have an effect?")
_NOTHING = 0.05
"""A parameter has practically no effect if its share is surely below this."""
_CHANCE = 0.02
"""And if chance alone would show coefficients like its own more often than this."""
_LEAST_EXPLAINED = 0.3
"""The part of the variance that all parameters must explain before one is called idle."""
_MOST_PAIRS = 2


def effects(data: AuditData) -> Card:
    """Warn of parameters that explain less than a twentieth, alone and with others."""
    if data.population:
        return _card("not enough data", "Trials changed their parameters.")
    at, losses = data.comparable()
    shares = shares_of(data)
    where = f"{data.metric} at {data.word} {at}" if at else data.metric
    if shares is None:
        if flat := data.all_equal([*losses.values()]):
            return _card("not enough data", flat)
        text = (
            f"{len(losses)} trials have a comparable result, {len(set(losses.values()))} of them "
            f"different: too few for the effects of {len(data.space)} parameters."
        )
        return _card("not enough data", text, remedy="run more trials")
    known = rank_effects(losses, data.params, list(data.space))
    clear = {key for key, one in known.items() if one.chance * len(known) < 0.05}
    idle = [key for key in shares.total if key not in clear and _is_idle(shares.total[key])]
    figure = {
        "num_trials": shares.num_trials,
        "explained": shares.explained,
        "report": at,
        "parameters": {
            key: {"alone": _numbers(shares.alone[key]), "total": _numbers(one)}
            for key, one in shares.total.items()
        },
        "interactions": [
            {"keys": list(pair), **_numbers(one)} for pair, one in shares.pairs.items()
        ],
        "without_effect": idle,
    }
    together = [pair for pair, one in shares.pairs.items() if one.low > 0 and one.value > _NOTHING]
    evidence = _sentence(data, shares, where, together)
    if shares.explained < _LEAST_EXPLAINED:
        text = f"{evidence} That is too little to call a parameter idle."
        return _card("not enough data", text, figure, "run more trials")
    if not idle:
        return _card("pass", evidence, figure)
    names = listed([data.name(key) for key in idle])
    most = max(shares.total[key].high for key in idle)
    evidence += f" {names}: at most {most:.0%}, alone and with others."
    return _card(
        "warn",
        evidence,
        figure,
        f"search {names} no longer: fix it at the best trial's value",
        _fixed(data, idle),
    )


def shares_of(data: AuditData) -> VarianceShares | None:
    """Return how the variance of the result divides among the parameters; None if unknown."""
    _, losses = data.comparable()
    params = data.params
    numbers = [number for number in params if number in losses]
    places = {
        key: [_place(one, params[number].get(key)) for number in numbers]
        for key, one in data.space.items()
    }
    return variance_shares(places, [losses[number] for number in numbers]) if numbers else None


def _is_idle(share: Share) -> bool:
    return share.high < _NOTHING and share.chance > _CHANCE


def _place(distribution: Distribution, value: object) -> float | str | None:
    """Return where a value lies from 0 to 1, or the option that it is; None without a value."""
    if value is None:
        return None
    if isinstance(distribution, Choice):
        options = [repr(option) for option in distribution.options]
        numeric = all(map(is_number, distribution.options)) and len(options) > 1
        if repr(value) not in options:
            return None
        return options.index(repr(value)) / (len(options) - 1) if numeric else repr(value)
    return place(distribution, value)


def _sentence(
    data: AuditData, shares: VarianceShares, where: str, together: Sequence[tuple[str, str]]
) -> str:
    parts = [
        f"{data.name(key)} {one.value:.0%} ({one.low:.0%} to {one.high:.0%})"
        for key, one in shares.total.items()
    ]
    found = (
        f"The parameters explain {shares.explained:.0%} of the ranking by {where} among "
        f"{shares.num_trials} trials; each, with its interactions: {', '.join(parts)}."
    )
    for first, second in together[:_MOST_PAIRS]:
        share = shares.pairs[first, second]
        found += (
            f" {data.name(first)} and {data.name(second)} act together ({share.value:.0%}): "
            "choose them together."
        )
    return found


def _numbers(share: Share) -> dict[str, float]:
    return {"share": share.value, "low": share.low, "high": share.high}


def _fixed(data: AuditData, keys: Sequence[str]) -> list[str] | None:
    ranked = data.ranked
    best = ranked[0].params if ranked else {}
    if not all(key in best for key in keys):
        return None
    fixed = {key: data.space[key].configured(_short(best[key])) for key in keys}
    values = [f"space.{key}={write_flow({'choice': [value]})}" for key, value in fixed.items()]
    return ["clone", "NEW", *(word for value in values for word in ("-s", value))]


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
