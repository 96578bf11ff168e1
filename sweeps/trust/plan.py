"""Say what a sweep will take, what a number of hours buys, and write the spec of that.

Nothing else is created. What must not live here: what a plan consists of (`engine.sweep_plan`),
and the measurements (`run.check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sweeps.engine.planned_resources import planned_resources
from sweeps.engine.resources import Machine
from sweeps.engine.sweep_plan import SweepPlan, make_plan
from sweeps.errors import SpecError, UserError
from sweeps.formatting import format_duration, format_number
from sweeps.path_checks import write_file
from sweeps.run.check import CheckResult, check_sweep
from sweeps.spec.automatic import AutoChoice
from sweeps.spec.document import Document
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.spec.yaml_reader import with_values

_REDUCTIONS = (2, 3, 4)
_MOST_TRIALS = 1_000_000


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


@dataclass(frozen=True)
class PlanResult:
    """What a sweep will take, and what it would take with other stopping rules."""

    checked: CheckResult
    options: Sequence[PlanOption]
    """The spec's own rule first. With a number of hours, each with the trials that fit."""
    hours: float | None

    @property
    def plan(self) -> SweepPlan:
        """The plan with the spec's own rule."""
        return self.options[0].plan

    @property
    def trials(self) -> int:
        """The planned number of configurations with the spec's own rule."""
        return self.options[0].trials

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return self.checked.as_dict() | {
            "plan": self.plan.as_dict(),
            "warnings": self.warnings,
            "for_hours": self.hours,
            "options": [option.as_dict() for option in self.options],
        }

    @property
    def warnings(self) -> list[str]:
        """Probable mistakes, a sentence each."""
        return self._planned.warnings

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan and the priors as pairs of a word and a sentence."""
        return self._planned.rows()

    @property
    def _planned(self) -> CheckResult:
        return replace(self.checked, plan=self.plan)


def plan_sweep(
    file: Path,
    spec: SweepSpec,
    *,
    hours: float | None = None,
    thorough: bool = False,
    choices: Sequence[AutoChoice] = (),
) -> PlanResult:
    """Return what a sweep will take, by some measured steps and a simulation of its rule."""
    checked = check_sweep(file, spec, thorough=thorough, choices=choices)
    if hours is not None and checked.plan.seconds is None:
        raise UserError(
            f"--hours {hours:g} cannot be planned: no step of task '{spec.task.name}' was "
            "measured, so its seconds are unknown; choose trials by -s trials=N, and set the "
            "limit by -s stop.hours=H",
        )
    options = [
        _option(checked, overrides, changed, hours) for overrides, changed in _variants(spec)
    ]
    return PlanResult(checked, options, hours)


def write_plan(
    result: PlanResult, document: Document, target: Path, settings: Sequence[str] = ()
) -> str:
    """Write the planned spec into a new file, with the user's comments as far as possible."""
    checked = result.checked
    spec = checked.spec.model_copy(update={"trials": result.trials})
    changed = [*settings, f"trials={spec.trials}"]
    text = _kept_text(checked.file, document, spec, settings)
    if text is None:
        text = f"# The plan of {checked.file}: {', '.join(changed)}\n{spec.to_yaml()}"
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
    checked: CheckResult, overrides: dict[str, Any], spec: SweepSpec, hours: float | None
) -> PlanOption:
    """Return the plan of a spec; with hours, with as many trials as end within them."""
    machine, facts = Machine.probe(), checked.facts

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
