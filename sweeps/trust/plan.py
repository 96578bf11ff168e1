"""Check a spec and its task, say what its sweep will take, and write the spec of a plan.

Nothing else is created. What must not live here: what a plan consists of (`engine.sweep_plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweeps.engine.planned_resources import planned_resources
from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.engine.sweep_plan import SweepPlan, make_plan
from sweeps.engine.task_check import TaskFacts, TaskInspector
from sweeps.errors import SpecError, UserError
from sweeps.formatting import format_duration, format_number
from sweeps.path_checks import write_file
from sweeps.run.launch import check_tracking
from sweeps.search.dry_run import dry_run
from sweeps.spec.applied_priors import AppliedPrior, applied_priors
from sweeps.spec.automatic import AutoChoice
from sweeps.spec.document import Document
from sweeps.spec.own_values import resolve_search
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.yaml_reader import with_values
from sweeps.stores import check_webhook

_REDUCTIONS = (2, 3, 4)
_MOST_TRIALS = 1_000_000
_SHOWN_FACTS = (
    "own_loop",
    "num_parameters",
    "num_train",
    "num_val",
    "steps_per_epoch",
    "total_steps",
    "device",
    "precision",
    "weight_bytes",
    "optimizer_bytes",
    "step_seconds",
    "evaluation_seconds",
    "build_seconds",
)


@dataclass(frozen=True)
class PlanOption:
    """A sweep with one stopping rule, and what it takes."""

    overrides: dict[str, Any]
    """The keys of the spec that differ, besides `trials`."""
    trials: int
    """The planned number of configurations; the plan counts each seed of each."""
    plan: SweepPlan

    def as_dict(self) -> dict[str, Any]:
        """Return the option for JSON."""
        return {"overrides": self.overrides, **self.plan.as_dict()}


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """A valid spec, what its sweep will take, and what it would take with other stopping rules."""

    file: Path
    spec: SweepSpec
    resources: ResourcePlan
    facts: TaskFacts
    options: Sequence[PlanOption]
    """The spec's own rule first. With a number of hours, each with the trials that fit."""
    hours: float | None
    choices: Sequence[AutoChoice]
    """What `auto` took."""
    caution: str | None
    """What the plan is for, unless it is this machine alone."""

    @property
    def plan(self) -> SweepPlan:
        """The plan with the spec's own rule."""
        return self.options[0].plan

    @property
    def trials(self) -> int:
        """The planned number of configurations with the spec's own rule."""
        return self.options[0].trials

    @property
    def warnings(self) -> list[str]:
        """Probable mistakes, a sentence each."""
        return [
            *([self.caution] if self.caution else []),
            *self.facts.cautions,
            *self.facts.checked,
            *self.spec.direction_warnings(),
            *resolve_search(self.spec, self.facts.default_arguments).cautions,
            *self.plan.warnings(),
        ]

    @property
    def priors(self) -> Sequence[AppliedPrior]:
        """The priors around which trials are drawn."""
        spec = self.spec
        defaults = spec.search.priors == "defaults"
        return applied_priors(spec.space, spec.train.optimizer.name, with_defaults=defaults)

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan and the priors as pairs of a word and a sentence."""
        found = "; ".join(map(str, self.priors))
        return [*self.plan.rows(), *([("priors", found)] if found else [])]

    @property
    def not_checked(self) -> list[str]:
        """The keys that only a run checks."""
        spec = self.spec
        # A check has no root, connects to nothing, and trains the task in one process.
        outside = {
            WORKERS: max(spec.searched_workers or (spec.resources.workers,)) > 1,
            "search.warm_start": spec.search.warm_start,
            "search.priors": spec.search.priors == "history",
            "tracking.uri": spec.tracking.uri,
            "storage.checkpoints": spec.storage.checkpoints,
        }
        return [key for key, value in outside.items() if value]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "file": str(self.file),
            "name": self.spec.name,
            "resources": asdict(self.resources),
            "task": {key: getattr(self.facts, key) for key in _SHOWN_FACTS},
            "auto": [choice.as_dict() for choice in self.choices],
            "priors": [prior.as_dict() for prior in self.priors],
            "plan": self.plan.as_dict(),
            "warnings": self.warnings,
            "not_checked": self.not_checked,
            "for_hours": self.hours,
            "options": [option.as_dict() for option in self.options],
        }


def plan_sweep(
    file: Path,
    spec: SweepSpec,
    *,
    hours: float | None = None,
    thorough: bool = False,
    choices: Sequence[AutoChoice] = (),
) -> PlanResult:
    """Return what a sweep will take, by some measured steps and a simulation of its rule."""
    dry_run(spec)
    check_tracking(spec)
    check_webhook(spec)
    machine = Machine.probe()
    inspector = TaskInspector(spec, planned_resources(spec, machine).plan, thorough=thorough)
    facts = inspector.facts()
    if hours is not None and facts.step_seconds is None:
        raise UserError(
            f"--hours {hours:g} cannot be planned: no step of task '{spec.task.name}' was "
            "measured, so its seconds are unknown; choose trials by -s trials=N, and set the "
            "limit by -s stop.hours=H",
        )
    resources, _, caution = planned_resources(spec, machine, facts.step_memory)
    return PlanResult(
        file=file,
        spec=spec,
        resources=resources,
        facts=facts,
        options=[
            _option(machine, facts, overrides, changed, hours)
            for overrides, changed in _variants(spec)
        ],
        hours=hours,
        choices=choices,
        caution=caution,
    )


def write_plan(
    result: PlanResult, document: Document, target: Path, settings: Sequence[str] = ()
) -> str:
    """Write the planned spec into a new file, with the user's comments as far as possible."""
    spec = result.spec.model_copy(update={"trials": result.trials})
    changed = [*settings, f"trials={spec.trials}"]
    text = _kept_text(result.file, document, spec, settings)
    if text is None:
        text = f"# The plan of {result.file}: {', '.join(changed)}\n{spec.to_yaml()}"
    try:
        write_file(target, text.encode(), "--write", overwrite=False)
    except FileExistsError:
        raise UserError(
            f"{target} exists already; nothing is overwritten; remove it, or choose another name"
        ) from None
    return ", ".join(changed)


def _kept_text(
    file: Path, document: Document, spec: SweepSpec, settings: Sequence[str]
) -> str | None:
    """Return the text of the user's file with the new values; None if that is not possible."""
    text = with_values(
        file.read_text(encoding="utf-8"),
        [*(setting.split("=", 1) for setting in settings), ("trials", str(spec.trials))],
    )
    if text is None:
        return None
    try:
        return text if parse_spec(text, document.label) == spec else None
    except SpecError:
        return None


def _variants(spec: SweepSpec) -> Iterator[tuple[dict[str, Any], SweepSpec]]:
    """Yield the spec, and the spec with other reductions and without early stopping."""
    yield {}, spec
    section = spec.early_stopping
    if section.rule.is_population:  # its trials are its members
        return
    own = section.rule.model_dump().get("reduction")
    if own is not None and section.rule.rungs(spec.budget.reports):
        for reduction in _REDUCTIONS:
            if reduction != own:
                yield (
                    {"early_stopping.reduction": reduction},
                    _with_rule(spec, reduction=reduction),
                )
    if section.scheduler != "none" or section.patience is not None:
        overrides: dict[str, Any] = {"early_stopping.scheduler": "none"}
        if section.patience is not None:
            overrides["early_stopping.patience"] = None
        yield overrides, _with_rule(spec, scheduler="none", patience=None)


def _with_rule(spec: SweepSpec, **changed: Any) -> SweepSpec:
    return spec.model_copy(
        update={"early_stopping": spec.early_stopping.model_copy(update=changed)}
    )


def _option(
    machine: Machine,
    facts: TaskFacts,
    overrides: dict[str, Any],
    spec: SweepSpec,
    hours: float | None,
) -> PlanOption:
    """Return the plan of a spec; with hours, with as many trials as end within them."""

    def planned(trials: int) -> PlanOption:
        changed = spec.model_copy(update={"trials": trials})
        resources, memory, _ = planned_resources(changed, machine, facts.step_memory)
        made = make_plan(changed, resources, facts, memory=memory)
        return PlanOption(overrides, changed.num_trials, made)

    if hours is None or spec.early_stopping.rule.is_population:
        return planned(spec.trials)
    return _largest(planned, spec, hours * 3600)


def _largest(planned: Callable[[int], PlanOption], spec: SweepSpec, limit: float) -> PlanOption:
    """Return the plan with about the most trials that end within a limit in seconds."""

    def seconds(found: PlanOption) -> float:
        assert found.plan.seconds is not None  # a step was measured
        return found.plan.seconds

    trials = spec.trials
    for _ in range(8):  # the time is about proportional to the number of trials
        found = planned(trials)
        nearer = max(1, min(_MOST_TRIALS, int(found.trials * limit / seconds(found))))
        nearer = spec.max_trials(nearer)
        if nearer == found.trials:
            break
        trials = nearer
    found = planned(trials)
    while seconds(found) > limit and trials > 1:
        trials = min(trials - 1, int(trials * 0.97))
        found = planned(trials)
    if seconds(found) > limit:
        raise UserError(
            f"--hours {format_number(limit / 3600)} buys no trial: one to its end takes "
            f"about {format_duration(seconds(found))} ({spec.budget.reports} "
            f"{spec.budget.report_word}s of {found.plan.epoch_seconds:.3g} s); allow more "
            "hours, or shorten the budget",
        )
    return found
