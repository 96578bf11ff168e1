"""Search serially without training: suggestions from a real ledger, and an invented loss."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.ledger.ledger import Ledger
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec, parse_spec

SPEC = """
name: quad
task: digits
metric: val/loss
mode: min
trials: 12
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.clip.max_norm: {uniform: [0.1, 10]}
"""

Params = dict[str, Any]


def spec_of(*overrides: str) -> SweepSpec:
    """Return a small spec with overrides."""
    return parse_spec(SPEC, "quad.yaml", overrides)


def ledger_at(path: Path) -> Ledger:
    """Open a ledger, or create it."""
    if path.exists():
        return Ledger.open(path)
    return Ledger.create(path, mode="min", sweep_id="s")


def loss(params: Params) -> float:
    """Something to learn from: best at a small rate and a norm of 5."""
    rate = params.get("train.optimizer.lr", 0.01)
    return float((rate - 0.01) ** 2 * 100 + (params.get("train.clip.max_norm", 5.0) - 5) ** 2)


def end(ledger: Ledger, number: int, ending: Any = "complete") -> None:
    """Let a trial report its loss and end."""
    ledger.report(number, epoch=1, step=1, value=loss(ledger.trial(number).params))
    ledger.finish(number, ending)


def search(path: Path, spec: SweepSpec, *, deaths: Sequence[int] = ()) -> list[Params]:
    """Run a sweep in turn up to its number of trials, beginning with those that are unfinished.

    Args:
        deaths: After asking for these trials, the driver dies once and another one goes on.
    """
    left = list(deaths)
    while True:
        ledger = ledger_at(path)
        proposer = Suggester(spec, ledger)
        for trial in ledger.trials():
            if not trial.finished:
                end(ledger, trial.number)
        for number in range(len(ledger.trials()), spec.trials):
            ledger.add(proposer.propose(number))
            if number in left:
                left.remove(number)
                break
            end(ledger, number)
        else:
            return [trial.params for trial in ledger.trials()]
