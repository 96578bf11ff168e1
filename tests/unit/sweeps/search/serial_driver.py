"""A serial sweep: its searcher is asked for a trial after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sweeps.ledger.ledger import Ledger
from sweeps.paths import SweepPaths
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.spec.spec import SweepSpec

SPEC = """
name: quad
task: digits
metric: val/loss
mode: min
trials: 8
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
search: {sampler: tpe, startup_trials: 3}
"""


def loss_of(params: dict[str, Any]) -> float:
    """Return the value of a trial."""
    return (params["train.optimizer.lr"] - 0.01) ** 2 + params["train.clip.max_norm"] / 100


class Driver:
    """Asks and tells like a serial sweep does."""

    def __init__(
        self, path: Path, spec: SweepSpec, fence: Callable[[], None] = lambda: None
    ) -> None:
        self.ledger = (
            Ledger.open(path) if path.exists() else Ledger.create(path, mode="min", sweep_id="s")
        )
        self.searcher = LedgerSearcher(
            self.ledger,
            spec,
            SweepPaths(path.parent, "quad"),
            DriverCallbacks(fence=fence, refuse=lambda *_: None),
            Capacity(1, 1),
        )

    def ask(self, trial_id: str) -> Any:
        return self.searcher.suggest(trial_id)

    def tell(self, trial_id: str, config: dict[str, Any]) -> None:
        number = config["number"]
        self.ledger.report(number, epoch=1, step=1, value=loss_of(config["params"]))
        self.ledger.finish(number, "complete")
        self.searcher.on_trial_complete(trial_id)
