"""Check a spec and its task, and find out what the sweep will take; starts nothing.

What must not live here: what a plan consists of (`engine.sweep_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sweeps.engine.planned_resources import planned_resources
from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.engine.sweep_plan import SweepPlan, make_plan
from sweeps.engine.task_check import TaskFacts, TaskInspector
from sweeps.run.launch import check_tracking
from sweeps.search.dry_run import dry_run
from sweeps.spec.applied_priors import AppliedPrior, applied_priors
from sweeps.spec.automatic import AutoChoice
from sweeps.spec.own_values import resolve_search
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.spec import SweepSpec
from sweeps.stores import check_webhook

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
class CheckResult:
    """A valid spec, and what its sweep will take."""

    file: Path
    spec: SweepSpec
    resources: ResourcePlan
    facts: TaskFacts
    plan: SweepPlan
    choices: Sequence[AutoChoice] = ()
    """What `auto` took."""
    caution: str | None = None
    """What the plan is for, unless it is this machine alone."""

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
        return not_checked(self.spec)

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
        }


def check_sweep(
    file: Path,
    spec: SweepSpec,
    *,
    thorough: bool,
    choices: Sequence[AutoChoice] = (),
) -> CheckResult:
    """Check a spec and its task without starting a sweep."""
    dry_run(spec)
    check_tracking(spec)
    check_webhook(spec)
    machine = Machine.probe()
    resources = planned_resources(spec, machine).plan
    inspector = TaskInspector(spec, resources, thorough=thorough)
    facts = inspector.facts()
    resources, memory, caution = planned_resources(spec, machine, facts.step_memory)
    sweep_plan = make_plan(spec, resources, facts, memory=memory)
    return CheckResult(file, spec, resources, facts, sweep_plan, choices, caution)


def not_checked(spec: SweepSpec) -> list[str]:
    """Return the keys that only a run checks."""
    # A check has no root, connects to nothing, and trains the task in one process.
    outside = {
        WORKERS: max(spec.searched_workers or (spec.resources.workers,)) > 1,
        "search.warm_start": spec.search.warm_start,
        "tracking.uri": spec.tracking.uri,
        "storage.checkpoints": spec.storage.checkpoints,
    }
    return [key for key, value in outside.items() if value]
