"""Trials of earlier sweeps, taken along for the sampler alone.

What is taken is fixed when a sweep is created, and kept in its ledger: the earlier sweep may be
deleted then. It is none of this sweep's trials, and shows nowhere but in what is suggested. What
must not live here: how samplers are shown it (`proposals`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweeps.config.logged_params import flatten
from sweeps.config.revisions import read_spec
from sweeps.config.search_space import SearchSpace
from sweeps.config.spec import SweepSpec
from sweeps.errors import Issue, SpecError, UserError
from sweeps.ledger.location import ledger_location
from sweeps.ledger.reader import LedgerReader, TrialSummary
from sweeps.paths import SweepPaths


class WarmStartRefused(UserError):
    """An earlier sweep cannot be learnt from.

    Args:
        place: Its place in `search.warm_start`.
        message: Why; the rule; what to do.
    """

    def __init__(self, place: int, message: str) -> None:
        super().__init__([Issue(("search", "warm_start", place), message)])


@dataclass(frozen=True)
class PriorTrial:
    """One trial of an earlier sweep."""

    params: Mapping[str, Any]
    """A point of the search space that the new sweep was created with."""
    value: float
    """Its best report; of one that was stopped, its last."""
    epoch: int
    """How far it was trained."""
    complete: bool
    """Whether it was trained to its end; otherwise it was stopped."""


@dataclass(frozen=True)
class WarmStart:
    """What a sweep was given of earlier ones."""

    trials: Sequence[PriorTrial] = ()
    told: str = ""
    """What was taken and what was left, in a sentence."""

    def to_data(self) -> dict[str, Any]:
        """Return plain data that `from_data` reads."""
        return {"trials": [asdict(trial) for trial in self.trials], "told": self.told}

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | None) -> WarmStart:
        """Read what `to_data` wrote; None: nothing was."""
        return (
            cls()
            if data is None
            else cls([PriorTrial(**trial) for trial in data["trials"]], data["told"])
        )


def collect_warm_start(root: Path, spec: SweepSpec) -> WarmStart:
    """Read what the sweeps that `search.warm_start` names can teach.

    Raises:
        WarmStartRefused: One of them does not exist, or measures something else.
    """
    taken: list[PriorTrial] = []
    told: list[str] = []
    for place, name in enumerate(spec.search.warm_start):
        found, left = _read(SweepPaths(root, name), spec, place)
        taken += found
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(left.items()))
        told.append(f"{len(found)} trials of '{name}'" + (f" (left out: {why})" if why else ""))
    return WarmStart(taken, f"warm start from {' and '.join(told)}" if told else "")


def _read(paths: SweepPaths, spec: SweepSpec, place: int) -> tuple[list[PriorTrial], Counter[str]]:
    if not paths.exists():
        raise WarmStartRefused(
            place,
            f"'{paths.name}': there is no such sweep below {paths.root}; a warm start takes "
            "trials of earlier sweeps there; `sweep list` shows them",
        )
    other = read_spec(paths.spec).spec
    for key in ("metric", "mode"):
        was, wanted = getattr(other, key), getattr(spec, key)
        if was != wanted:
            raise WarmStartRefused(
                place,
                f"'{paths.name}': its {key} is {was}, and this sweep's is {wanted}; results of "
                "another kind teach nothing; leave it out of search.warm_start",
            )
    view, space = LedgerReader(ledger_location(paths, other)), spec.search_space()
    reports = view.reports()
    taken: list[PriorTrial] = []
    left: Counter[str] = Counter()
    for trial in view.trials:
        found = _take(trial, other, space, reports[trial.number])
        if isinstance(found, PriorTrial):
            taken.append(found)
        else:
            left[found] += 1
    return taken, left


def _take(
    trial: TrialSummary, other: SweepSpec, space: SearchSpace, reports: Mapping[int, float]
) -> PriorTrial | str:
    """Return a trial as it is taken along, or why it is not."""
    if not trial.finished:
        return "unfinished"
    if trial.state == "failed" or trial.value is None:
        return "without a result"
    # What was stopped is taken at its last report, with what it was trained with then.
    last = max(reports)  # there is one, or there were no value
    params = trial.best_params if trial.state == "complete" else trial.params_at(last)
    values = dict(params)
    if not space.unconditional().keys() <= values.keys():
        try:
            config = other.trial_config(trial.number, params)
        except SpecError:
            return "not of its spec any more"
        values = dict(flatten(config.model_dump())) | values
    point = space.project(values)
    if point is None:
        return "outside the space"
    if trial.state == "complete":
        return PriorTrial(point, trial.value, trial.epoch, complete=True)
    return PriorTrial(point, reports[last], last, complete=False)
