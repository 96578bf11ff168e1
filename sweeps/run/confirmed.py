"""What tracking receives of a confirmation: tags and metrics of the leaders' runs.

What must not live here: what a confirmation says to users (`trust.confirmation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sweeps.formatting import format_number
from sweeps.ledger.trials import TrialSummary
from sweeps.reconcile.confirmation import Confirmation
from trainable.store.metrics_file import Row


def confirm_tags(found: Confirmation) -> dict[int | None, dict[str, str]]:
    """Return tags, by trial and for the sweep's own run (None), once a confirmation is decided."""
    if not found.is_decided:
        return {}
    chances = {} if found.race is None else {o.number: o.p_best for o in found.race.contenders}
    tags: dict[int | None, dict[str, str]] = {}
    for number in found.request.leaders:
        if number in found.failed:
            text = f"out: {found.failed[number]}"
        else:
            out = f", out after {found.dropped[number]} seeds" if number in found.dropped else ""
            chance = format_number(chances.get(number))
            text = f"best with probability {chance}, {len(found.values[number])} seeds{out}"
        tags[number] = {"confirm": text}
    winner = found.winner
    tags[None] = {"confirmed_trial": "" if winner is None else str(winner)}
    return tags


def confirm_rows(found: Confirmation, trials: Sequence[TrialSummary]) -> Mapping[int, Row]:
    """Return the metrics of each leader that was not out by a failure, once it is decided.

    The step is the number of the confirmation's last trial: a later confirmation has later steps.
    """
    if not found.is_decided or found.race is None:
        return {}
    runs = [number for numbers in found.trials.values() for number in numbers]
    at_ms = max(trials[number].ended_ms or 0 for number in runs)
    rows = {}
    for one in found.race.contenders:
        known = {
            "confirm/mean": one.mean,
            "confirm/p_best": one.p_best,
            "confirm/optimism": one.optimism,
            "confirm/num_seeds": float(one.num_seeds),
        }
        metrics = {name: value for name, value in known.items() if value is not None}
        rows[one.number] = Row(max(runs), at_ms, metrics)
    return rows
