"""What a new sweep learns from earlier ones: their trials, or priors of its space.

Both are read when the new sweep is created. The trials that `search.warm_start` names are stored
in its ledger, the priors of `search: {priors: history}` in its spec. So the earlier sweeps may be
deleted. What must not live here: how samplers receive trials (`sweeps.search.suggest`), and which
trials are drawn around priors (`sweeps.search.prior_trials`).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from statistics import pstdev
from typing import Any

from sweeps.errors import Issue, LedgerError, RevisionError, SpecError, UserError
from sweeps.formatting import counted
from sweeps.ledger.over_seeds import configurations
from sweeps.ledger.ranking import is_cut_off, values_by, values_over_seeds
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths, command_line, list_sweeps
from sweeps.spec.applied_priors import WIDE, applied_priors
from sweeps.spec.priors import WIDTH, Prior
from sweeps.spec.revisions import read_revisions, read_spec
from sweeps.spec.space import Choice, Distribution, Powers
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import flatten
from sweeps.stopping.rule import make_pausing_rule
from trainable.user_code.task_import import BUILT_IN


class WarmStartRefused(UserError):
    """An earlier sweep cannot be used for a warm start."""

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
    reports: Mapping[int, float] = field(default_factory=dict)
    """What its reports brought, by epoch, as far as its value at a rung depends on them. Empty if
    they cannot be compared with those of the new sweep."""
    cut_off: bool = False
    """Whether its end says nothing: a request, the end of its sweep, or a shorter budget."""


@dataclass(frozen=True)
class WarmStart:
    """The trials of earlier sweeps that a sweep's sampler learns from."""

    trials: Sequence[PriorTrial] = ()
    summary: str = ""
    """How many trials were taken and left out, in a sentence."""

    def to_data(self) -> dict[str, Any]:
        """Return plain data for `from_data`."""
        trials = [asdict(one) | {"reports": [*one.reports.items()]} for one in self.trials]
        return {"trials": trials, "told": self.summary}

    @classmethod
    def from_data(cls, data: Mapping[str, Any] | None) -> WarmStart:
        """Return the warm start in the data of `to_data`; an empty one for None."""
        if data is None:
            return cls()
        trials = [
            PriorTrial(**{**trial, "reports": dict(trial["reports"])}) for trial in data["trials"]
        ]
        return cls(trials, data["told"])


def collect_warm_start(root: Path, spec: SweepSpec) -> WarmStart:
    """Read the trials of the sweeps that `search.warm_start` names."""
    taken: list[PriorTrial] = []
    parts: list[str] = []
    for index, name in enumerate(spec.search.warm_start):
        found, left_out = _read(SweepPaths(root, name), spec, index)
        taken += found
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        parts.append(
            f"{counted(len(found), 'trial')} of '{name}'" + (f" (left out: {why})" if why else "")
        )
    if not parts:
        return WarmStart()
    return WarmStart(taken, f"warm start from {' and '.join(parts)}{_not_compared(spec, taken)}")


LEAST_HISTORY = 5
"""An earlier sweep with fewer trials says nothing about where good values are."""
_LEADERS = 4
"""One of so many trials of an earlier sweep is a leader."""
_FEWEST = 3
"""Fewer leaders do not show how far good values lie apart."""
_NARROWEST = 0.05
"""The least width of a prior from earlier sweeps."""


def with_history(paths: SweepPaths, spec: SweepSpec) -> tuple[SweepSpec, str]:
    """Return a new sweep's spec with the priors that earlier sweeps give, and where they are from.

    With `search: {priors: history}`, the best trial of the largest earlier sweep of the same task
    is where good values are expected. The width of a prior is the standard deviation of the
    leaders of all these sweeps, between 0.05 and 0.25 of the range. A parameter that this sweep
    did not search, or that has a prior of its own, gets none. A sweep that exists keeps the priors
    that it was created with.
    """
    if spec.search.priors != "history":
        return spec, ""
    if paths.exists():
        stored = read_spec(paths.spec).spec.space
        kept = {
            key: replace(one, prior=stored[key].prior) if key in stored else one
            for key, one in spec.space.items()
        }
        return spec.model_copy(update={"space": kept}), ""
    earlier: dict[str, Sequence[PriorTrial]] = {}
    unreadable = ""
    for other in list_sweeps(paths.root):
        try:
            found = _same_task(other, spec)
        except (RevisionError, SpecError, LedgerError, OSError) as error:
            unreadable += f"; {error}"
            continue
        if len(found) >= LEAST_HISTORY and found[0].complete:
            earlier[other.name] = found
    if not earlier:
        return spec, (
            f"no priors from earlier sweeps: none below {paths.root} has {LEAST_HISTORY} trials "
            f"of task {spec.task.name} by {spec.metric} within this space{unreadable}"
        )
    space = history_priors(spec.space, [*earlier.values()])
    new = {key: one for key, one in space.items() if one != spec.space[key]}
    priors = applied_priors(new, spec.train.optimizer.name, with_defaults=False)
    return (
        spec.model_copy(update={"space": space}),
        f"priors from {', '.join(earlier)}: {', '.join(map(str, priors)) or 'none'}",
    )


def _same_task(paths: SweepPaths, spec: SweepSpec) -> Sequence[PriorTrial]:
    """Return the trials of an earlier sweep, the best first, if its task is the same.

    A parameter that the sweep did not search is left out of its trials.
    """
    other = read_spec(paths.spec).spec
    same = attrgetter("task.name", "metric", "mode", "select")
    view = LedgerReader(paths.ledger)
    here = spec.task.name in BUILT_IN or view.run_from.get("code") == os.getcwd()
    if same(other) != same(spec) or not here:
        return []
    return [
        replace(one, params={key: one.params[key] for key in one.params if key in other.space})
        for one in best_first(_take_all(paths, view, spec, other)[0], spec.modes[0] == "min")
    ]


def best_first(trials: Iterable[PriorTrial], minimize: bool) -> list[PriorTrial]:
    """Return trials of one sweep: complete ones by value, then stopped ones, the longest first."""
    sign = 1 if minimize else -1
    return sorted(
        trials,
        key=lambda one: (not one.complete, -one.epoch * (not one.complete), sign * one.value),
    )


def history_priors(
    space: Mapping[str, Distribution], earlier: Sequence[Sequence[PriorTrial]]
) -> dict[str, Distribution]:
    """Return a space with the priors that earlier sweeps give; see `with_history`.

    Args:
        space: The distributions of the new sweep.
        earlier: The trials of each earlier sweep, the best first.
    """
    most = max(earlier, key=len)
    leaders = [one.params for some in earlier for one in some[: max(1, len(some) // _LEADERS)]]

    def with_prior(key: str, one: Distribution) -> Distribution:
        values = [params[key] for params in leaders if key in params]
        if one.prior is not None or key not in most[0].params:
            return one
        expected = most[0].params[key]
        if len(values) < _FEWEST:
            width = WIDTH
        elif isinstance(one, Choice) and not isinstance(one, Powers):
            width = sum(value != expected for value in values) / len(values)
        else:
            width = pstdev(map(one.share, values))
        width = round(min(max(width, _NARROWEST), WIDE), 3)
        return replace(one, prior=Prior(expected, width))

    return {key: with_prior(key, one) for key, one in space.items()}


def _not_compared(spec: SweepSpec, taken: Sequence[PriorTrial]) -> str:
    """Return what follows if trials have no reports that can be compared; empty if all have."""
    num = sum(not one.reports for one in taken)
    compares = spec.early_stopping.rule.comparable_epochs(spec.budget.reports)
    if not num or not compares or spec.search.sampler in ("cmaes", "nsgaii"):
        return ""
    return (
        f"; {num} of these trials have no reports like those of this sweep, so its own stopped "
        "trials rank behind all complete ones and are not compared at rungs; for that, let both "
        "budgets report alike (unit, report_every, val_batches), take no population (pbt, pb2), "
        "or leave search.warm_start out"
    )


def _read(paths: SweepPaths, spec: SweepSpec, index: int) -> tuple[list[PriorTrial], Counter[str]]:
    if not paths.exists():
        shown = command_line(paths.root, "list")
        raise WarmStartRefused(
            index,
            f"'{paths.name}': there is no such sweep below {paths.root}; a warm start takes "
            f"trials of earlier sweeps there; they are shown by: {shown}",
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
    return _take_all(paths, LedgerReader(paths.ledger), spec, other)


def _take_all(
    paths: SweepPaths, view: LedgerReader, spec: SweepSpec, other: SweepSpec
) -> tuple[list[PriorTrial], Counter[str]]:
    """Return an earlier sweep's trials as points of a new one, and why others are left out."""
    reports, seeds = view.reports(), configurations(view.trials)
    budgets = frozenset(one.budget.reports for one in read_revisions(paths.spec))
    source = _Source(spec, other, budgets)
    taken: list[PriorTrial] = []
    left_out: Counter[str] = Counter()
    # A trial that was trained to its end counts once, with the trial that finished it.
    finished = {one.finishes for one in view.trials if one.state == "complete"}
    for trial in view.trials:
        if trial.number in finished:
            left_out["trained to its end by a later trial"] += 1
            continue
        if trial.role not in ("search", "finish"):
            left_out[f"trained again with another {other.repeats.word}"] += 1
            continue
        mine = [(one, reports[one.number]) for one in seeds.get(trial.number, [trial])]
        found = source.take(trial, mine)
        if isinstance(found, PriorTrial):
            taken.append(found)
        else:
            left_out[found] += 1
    return taken, left_out


_Seed = tuple[TrialSummary, Mapping[int, float]]


class _Source:
    """An earlier sweep whose trials become points of a new one."""

    def __init__(self, spec: SweepSpec, other: SweepSpec, budgets: Collection[int]) -> None:
        self._other, self._space = other, spec.search_space()
        self._num_reports, self._budgets = spec.budget.reports, budgets
        self._select, self._minimize = spec.select, spec.modes[0] == "min"
        self._compares = spec.budget.report_kind == other.budget.report_kind
        rungs = spec.early_stopping.rule.comparable_epochs(spec.budget.reports)
        self._first_rung = rungs[0] if rungs and self._compares else math.inf
        self._pauses = make_pausing_rule(other)

    def take(self, trial: TrialSummary, seeds: Sequence[_Seed]) -> PriorTrial | str:
        """Return a trial as a point of the search space, or why it is left out."""
        if not trial.settled:
            return "unfinished"
        if trial.over_seeds is not None and trial.state == "complete" and not trial.has_result:
            return f"without all of their {self._other.repeats.word}s"
        if trial.state == "failed" or trial.value is None:
            return "without a result"
        # A stopped trial counts with its last report and the parameters at that time.
        ends = [max(mine) for one, mine in seeds if self._is_cut_off(one, mine)]
        cut_off = bool(ends)
        reports = seeds[0][1] if len(seeds) == 1 else self._over_seeds(seeds, min(ends, default=0))
        last = max(reports)  # not empty, because the trial has a value
        is_complete = trial.state == "complete"
        if cut_off and not is_complete and last < self._first_rung:
            return "stopped by a request before they could be compared"
        params = trial.best_params if is_complete else trial.params_at(last)
        values = dict(params)
        if not self._space.unconditional().keys() <= values.keys():
            try:
                config = self._other.trial_config(trial.seed, params)
            except SpecError:
                return "not valid in its own spec any more"
            values = dict(flatten(config.model_dump())) | values
        point = self._space.project(values)
        if point is None:
            return "outside the space"
        # Earlier reports of a population's trial may belong to other parameters.
        kept = self._kept(reports) if self._compares and not trial.lineage else {}
        if is_complete:
            return PriorTrial(point, trial.value, trial.epoch, True, kept, cut_off)
        return PriorTrial(point, reports[last], last, False, kept, cut_off)

    def _over_seeds(self, seeds: Sequence[_Seed], end: int) -> dict[int, float]:
        """Return the values of a complete configuration by each epoch that a seed has reported."""
        every = [mine for _, mine in seeds]
        epochs = sorted({epoch for mine in every for epoch in mine if not end or epoch <= end})
        by = partial(values_by, minimize=self._minimize, select=self._select)
        combine = self._other.repeats.combine
        return {
            epoch: values_over_seeds([by(mine, epoch) for mine in every], combine)[0]
            for epoch in epochs
        }

    def _is_cut_off(self, trial: TrialSummary, reports: Mapping[int, float]) -> bool:
        complete = trial.state == "complete"
        waits = self._pauses is not None and not trial.exempt and self._pauses.pauses_at(reports)
        return (complete or not waits) and is_cut_off(
            complete=complete,
            reason=trial.reason,
            last=max(reports),
            budget=self._num_reports,
            earlier=self._budgets,
        )

    def _kept(self, reports: Mapping[int, float]) -> dict[int, float]:
        """Return the reports on which the value at a rung depends, and the last one."""
        if self._select == "final":
            return dict(reports)
        kept: dict[int, float] = {}
        best = math.inf
        for epoch, value in sorted(reports.items()):
            loss = value if self._minimize else -value
            if math.isfinite(loss) and loss < best:
                kept[epoch], best = value, loss
        last = max(reports)
        return {**kept, last: reports[last]}
