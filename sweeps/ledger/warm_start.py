"""Collect trials of earlier sweeps from which a new sweep's sampler learns.

The trials are chosen when the new sweep is created, and stored in its ledger. So the earlier sweep
may be deleted. The trials do not count as trials of the new sweep; they only influence
suggestions. What must not live here: how samplers receive them (`sweeps.search.suggest`).
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
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths


class WarmStartRefused(UserError):
    """An earlier sweep cannot be used for a warm start.

    Args:
        index: Its index in `search.warm_start`.
        message: Value, rule and remedy.
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__([Issue(("search", "warm_start", index), message)])


@dataclass(frozen=True)
class PriorTrial:
    """One trial of an earlier sweep."""

    params: Mapping[str, Any]
    """Its parameters as a point of the new sweep's first search space."""
    value: float
    """The value of a complete trial; the last report of a stopped trial."""
    epoch: int
    """The last epoch that it reported."""
    complete: bool
    """Whether it trained to its end; if false, it was stopped early."""


@dataclass(frozen=True)
class WarmStart:
    """The trials of earlier sweeps that a sweep's sampler learns from."""

    trials: Sequence[PriorTrial] = ()
    summary: str = ""
    """How many trials were taken and left out, in a sentence."""

    def to_data(self) -> dict[str, Any]:
        """Return plain data for `from_data`."""
        return {"trials": [asdict(trial) for trial in self.trials], "told": self.summary}

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | None) -> WarmStart:
        """Return the warm start in the data of `to_data`; an empty one for None."""
        return (
            cls()
            if data is None
            else cls([PriorTrial(**trial) for trial in data["trials"]], data["told"])
        )


def collect_warm_start(root: Path, spec: SweepSpec) -> WarmStart:
    """Read the trials of the sweeps that `search.warm_start` names.

    Raises:
        WarmStartRefused: One of them does not exist, or has another metric or mode.
    """
    taken: list[PriorTrial] = []
    parts: list[str] = []
    for index, name in enumerate(spec.search.warm_start):
        found, left_out = _read(SweepPaths(root, name), spec, index)
        taken += found
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        parts.append(f"{len(found)} trials of '{name}'" + (f" (left out: {why})" if why else ""))
    return WarmStart(taken, f"warm start from {' and '.join(parts)}" if parts else "")


def _read(paths: SweepPaths, spec: SweepSpec, index: int) -> tuple[list[PriorTrial], Counter[str]]:
    if not paths.exists():
        raise WarmStartRefused(
            index,
            f"'{paths.name}': there is no such sweep below {paths.root}; a warm start takes "
            "trials of earlier sweeps there; `sweep list` shows them",
        )
    other = read_spec(paths.spec).spec
    for key in ("metric", "mode", "select"):
        was, wanted = getattr(other, key), getattr(spec, key)
        if was != wanted:
            raise WarmStartRefused(
                index,
                f"'{paths.name}': its {key} is {was}, and this sweep's is {wanted}; a sampler "
                "cannot learn from other values; leave it out of search.warm_start",
            )
    view, space = LedgerReader(ledger_location(paths, other)), spec.search_space()
    reports = view.reports()
    taken: list[PriorTrial] = []
    left_out: Counter[str] = Counter()
    # A trial that was trained to its end counts once, with the trial that finished it.
    finished = {one.finishes for one in view.trials if one.state == "complete"}
    for trial in view.trials:
        if trial.number in finished:
            left_out["trained to its end by a later trial"] += 1
            continue
        if trial.role not in ("search", "finish"):
            left_out["trained again with another seed"] += 1
            continue
        found = _take(trial, other, space, reports[trial.number])
        if isinstance(found, PriorTrial):
            taken.append(found)
        else:
            left_out[found] += 1
    return taken, left_out


def _take(
    trial: TrialSummary, other: SweepSpec, space: SearchSpace, reports: Mapping[int, float]
) -> PriorTrial | str:
    """Return a trial as a point of the search space, or why it is left out."""
    if not trial.settled:
        return "unfinished"
    if trial.over_seeds is not None and trial.state == "complete" and not trial.has_result:
        return "without all of their seeds"
    if trial.state == "failed" or trial.value is None:
        return "without a result"
    # A stopped trial counts with its last report and the parameters at that time.
    last = max(reports)  # not empty, because the trial has a value
    params = trial.best_params if trial.state == "complete" else trial.params_at(last)
    values = dict(params)
    if not space.unconditional().keys() <= values.keys():
        try:
            config = other.trial_config(trial.seed, params)
        except SpecError:
            return "not valid in its own spec any more"
        values = dict(flatten(config.model_dump())) | values
    point = space.project(values)
    if point is None:
        return "outside the space"
    if trial.state == "complete":
        return PriorTrial(point, trial.value, trial.epoch, complete=True)
    return PriorTrial(point, reports[last], last, complete=False)
