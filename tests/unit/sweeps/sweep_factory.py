"""Make a sweep's directory without running anything."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from optuna.samplers import RandomSampler

from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.trials import Ending
from sweeps.paths import SweepPaths
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import parse_spec
from sweeps.view.sweep_view import SweepView
from tests.make_trials import proposal
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row

SPEC = """
name: {name}
task: digits
metric: {metric}
mode: {mode}
trials: 3
budget: {budget}
space: {space}
{more}
"""
RATE = "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}"


class MadeSweep:
    """A sweep with a ledger to which trials are added by hand."""

    def __init__(
        self,
        root: Path,
        name: str = "small",
        *,
        space: str = RATE,
        metric: str = "val/loss",
        mode: str = "min",
        budget: str = "{epochs: 10}",
        more: str = "",
    ) -> None:
        self.paths = SweepPaths(root, name)
        text = SPEC.format(
            name=name, space=space, metric=metric, mode=mode, budget=budget, more=more
        )
        self.spec = parse_spec(text, f"{name}.yaml")
        self.paths.directory.mkdir(parents=True)
        self.ledger = Ledger.create(
            self.paths.ledger,
            mode=self.spec.mode,
            sweep_id=f"id-{name}",
            select=self.spec.select,
            repeats=repeats_of(self.spec),
        )
        write_spec(self.paths.spec, self.spec)

    def copy(self, root: Path) -> MadeSweep:
        """Copy the sweep, of which nothing is being written, into another root."""
        made = copy.copy(self)
        made.paths = SweepPaths(root, self.paths.name)
        shutil.copytree(self.paths.directory, made.paths.directory)
        made.ledger = Ledger.open(made.paths.ledger)
        return made

    def add(
        self,
        ending: Ending | None,
        *values: float | Sequence[float],
        reason: str | None = None,
        params: dict[str, Any] | None = None,
    ) -> int:
        """Add a trial that reported `values` and so ended, or did not; returns its number.

        With several metrics, each report is a sequence. Without `params`, they are random.
        """
        space = {key: value.to_optuna() for key, value in self.spec.space.items()}
        if params is None:
            drawn = proposal(space, RandomSampler(seed=len(self.ledger.trials())))
        else:
            drawn = Suggestion(params, {key: space[key] for key in params})

        def store() -> int:
            number = self.ledger.add(drawn).number
            for epoch, reported in enumerate(values, start=1):
                value, *others = reported if isinstance(reported, Sequence) else [reported]
                self.ledger.report(
                    number, epoch=epoch, step=epoch * 10, value=value, others=others
                )
            if ending is not None:
                self.ledger.finish(number, ending, reason=reason)
            return number

        return self.ledger.transaction(store)

    def repeat(self, first: int, ending: Ending | None, *values: float) -> int:
        """Add a further seed of a configuration; returns its number."""
        index = 1 + sum(trial.origin == first for trial in self.ledger.trials())
        number = self.ledger.add_extra("repeat", first, index).number
        for epoch, value in enumerate(values, start=1):
            self.ledger.report(number, epoch=epoch, step=epoch * 10, value=value)
        if ending is not None:
            self.ledger.finish(number, ending)
        return number

    def log(self, number: int, *rows: Row) -> None:
        """Write a trial's rows."""
        directory = self.paths.trial(number)
        directory.mkdir(parents=True, exist_ok=True)
        files = LocalFiles.of(directory)
        files.open()
        history = History(directory, files, step=0)
        history.append(rows)
        history.close()

    @property
    def view(self) -> SweepView:
        return SweepView(self.paths)
