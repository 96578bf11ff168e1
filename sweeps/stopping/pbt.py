"""Population based training: the rules `pbt` and `pb2`, and when members of a population pause.

Every trial is a member and pauses at each rung until all members have reached it. Then the worst
members continue from the best ones' weights with other hyperparameters: Jaderberg et al.,
"Population Based Training of Neural Networks" (2017). Unlike there, all members wait for each
other, so a decision depends on reports alone and a resumed driver decides the same. What must not
live here: which member copies which, with which hyperparameters (`search.pbt_exploit`), and the
ledger.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from sweeps.stopping.metric_values import Minimize
from sweeps.stopping.rule import PausingRule, Standing, StoppingRule
from trainable.config import Number


class Pbt(StoppingRule):
    """Stop no trial; let the worst copy the best, and perturb the copied hyperparameters."""

    name: ClassVar[str] = "pbt"
    description: ClassVar[str] = (
        "stops no trial: every `interval_epochs` the worst trials continue from the weights of "
        "the best with other hyperparameters."
    )
    first_epoch_key: ClassVar[str | None] = "interval_epochs"
    is_population: ClassVar[bool] = True

    interval_epochs: int = Field(default=1, ge=1)
    """`pbt`, `pb2`: epochs from one comparison to the next; below `budget.epochs`. With another
    budget: reports."""
    quantile: Number = Field(default=0.25, gt=0, le=0.5)
    """`pbt`, `pb2`: the share of trials that is replaced each time, by as many of the best."""
    resample: Number = Field(default=0.25, ge=0, le=1)
    """`pbt`, `pb2`: the probability that a hyperparameter is drawn anew instead of changed a
    little."""

    def rungs(self, epochs: int) -> tuple[int, ...]:
        """Return every `interval_epochs`-th epoch below the budget."""
        return tuple(range(self.interval_epochs, epochs, self.interval_epochs))

    def pausing(self, *, epochs: int, minimize: Minimize, num_trials: int) -> PausingRule | None:
        """Return the rule by which all members wait for each other at each rung."""
        return PopulationBasedTraining(
            rungs=self.rungs(epochs), minimize=minimize, num_trials=num_trials
        )


class Pb2(Pbt):
    """`pbt` whose numeric hyperparameters are chosen by a Gaussian process over past gains."""

    name: ClassVar[str] = "pb2"
    description: ClassVar[str] = (
        "is `pbt` whose new hyperparameters are chosen by a model of what improved trials so far."
    )
    models_gains: ClassVar[bool] = True

    def missing_package(self) -> str | None:
        """Return the message for an environment without scikit-learn."""
        if importlib.util.find_spec("sklearn") is not None:
            return None
        return (
            f"{self.name} needs the package 'scikit-learn', which is not installed; its model is "
            f"made of it; write {Pbt.name}, or run `pip install scikit-learn`"
        )


@dataclass(frozen=True, kw_only=True)
class PopulationBasedTraining(PausingRule):
    """All members wait at a rung for the last of them; then all resume."""

    def next_promotion(self, now: Standing) -> int | None:
        """Return the lowest-numbered member that may resume now; none is exempt."""
        if len(now.reports) < self.num_trials:
            return None
        last = {number: max(now.reports[number], default=0) for number in now.unfinished}
        behind = min(last.values(), default=0)
        waiting = [n for n in last if last[n] == behind and n not in now.live]
        return min(waiting) if waiting and behind in self.rungs else None

    def never_promoted(self, now: Standing) -> frozenset[int]:
        """Return no member: each one trains to the end."""
        del now
        return frozenset()
