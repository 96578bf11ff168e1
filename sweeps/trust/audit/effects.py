"""Does each searched parameter have an effect?

What must not live here: the estimate (`sweeps.trust.importance`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sweeps.formatting import counted, listed
from sweeps.spec.yaml_scalars import write_flow
from sweeps.statistics.variance_shares import Share
from sweeps.trust.audit.card import RUN_MORE, SAME_VALUES, Card
from sweeps.trust.audit.data import AuditData
from sweeps.trust.importance import as_numbers, importance_sentence, least_trials, percent

_card = partial(Card, "effects", "Does each searched parameter have an effect?")
_NOTHING = 0.05
"""A parameter has practically no effect if its share is surely below this."""
_CHANCE = 0.02
"""And if chance alone would show coefficients like its own more often than this."""
_LEAST_EXPLAINED = 0.3
"""The part of the variance that all parameters must explain before one is called idle."""
_MOST_PAIRS = 2


def effects(data: AuditData) -> Card:
    """Warn of parameters that explain less than a twentieth; pass only if all are known."""
    if data.population:
        return _card("does not apply", "trials changed their parameters.")
    found = data.importance
    if found is None:
        values = [t.value for t in data.ranked if t.value is not None]
        if flat := data.all_equal(values):
            return _card("not enough data", flat, remedy=SAME_VALUES)
        num_different = len(set(data.places.values()))
        text = (
            f"Trials with a result: {len(data.places)}, {num_different} of them different; the "
            f"effects of {counted(len(data.space), 'parameter')} need "
            f"{least_trials(data.space, data.params)}."
        )
        return _card("not enough data", text, remedy=RUN_MORE)
    idle = [key for key, share in found.shares.items() if _is_idle(share)]
    figure = {
        "num_trials": found.num_trials,
        "explained": found.explained,
        "parameters": {key: as_numbers(one) for key, one in found.shares.items()},
        "interactions": [
            {"keys": list(pair), **as_numbers(one)} for pair, one in found.pairs.items()
        ],
        "without_effect": idle,
    }
    names = {key: data.name(key) for key in found.shares}
    evidence = importance_sentence(found, names, data.metric)
    together = [pair for pair, one in found.pairs.items() if one.low > 0 and one.value > _NOTHING]
    for first, second in together[:_MOST_PAIRS]:
        share = percent(found.pairs[first, second].value)
        evidence += (
            f" {names[first]} and {names[second]} act together ({share}): choose them together."
        )
    if found.explained < _LEAST_EXPLAINED:
        text = (
            f"{evidence} All together explain {percent(found.explained)}: too little to call a "
            "parameter idle."
        )
        return _card("not enough data", text, figure, RUN_MORE)
    if idle:
        fixed = listed([names[key] for key in idle])
        remedy = f"search {fixed} no longer: fix it at the best trial's value"
        return _card("warn", evidence, figure, remedy, _fixed(data, idle))
    if not all(share.is_known for share in found.shares.values()):
        return _card("not enough data", evidence, figure, RUN_MORE)
    return _card("pass", evidence, figure)


def _is_idle(share: Share) -> bool:
    return share.high < _NOTHING and share.chance > _CHANCE


def _fixed(data: AuditData, keys: Sequence[str]) -> list[str] | None:
    ranked = data.ranked
    best = ranked[0].params if ranked else {}
    if not all(key in best for key in keys):
        return None
    fixed = {key: data.space[key].configured(_short(best[key])) for key in keys}
    values = [f"space.{key}={write_flow({'choice': [value]})}" for key, value in fixed.items()]
    return ["init", *(word for value in values for word in ("-s", value))]


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value
