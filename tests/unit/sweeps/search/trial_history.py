"""Ledgers in memory that a `Suggester` learns from, and searches in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.sqlite import IN_MEMORY
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec

Ended = Callable[[dict[str, Any]], float | str]
"""Returns the loss of parameters after one epoch, or why a trial with them fails."""


def empty_ledger(spec: SweepSpec) -> Ledger:
    """Return the ledger of a sweep without trials."""
    return Ledger.create(IN_MEMORY, mode=spec.modes, sweep_id="s")


def end(ledger: Ledger, suggestion: Suggestion, ended: float | list[float] | str) -> None:
    """Add a trial that is complete with a loss or values, or failed for a reason."""
    number = ledger.add(suggestion).number
    if isinstance(ended, str):
        ledger.finish(number, "failed", reason=ended)
        return
    value, *others = ended if isinstance(ended, list) else [ended]
    ledger.report(number, epoch=1, step=1, value=value, others=others)
    ledger.finish(number, "complete")


def search(spec: SweepSpec, count: int, ended: Ended) -> list[dict[str, Any]]:
    """Run a search one trial after the other, and return the suggested parameters."""
    ledger = empty_ledger(spec)
    suggester = Suggester(spec, ledger)
    for number in range(count):
        suggestion = suggester.propose(number)
        end(ledger, suggestion, ended(dict(suggestion.params)))
    return [trial.params for trial in ledger.frozen_trials()]
