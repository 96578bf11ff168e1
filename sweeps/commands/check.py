"""`sweep check`: check a spec and its task, and show what the sweep will take.

What must not live here: options and arguments (`cli`), and what a plan consists of
(`engine.sweep_plan`).
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from sweeps.commands import messages
from sweeps.commands.run import check_tracking
from sweeps.config.metric_direction import direction_warnings
from sweeps.config.spec import SweepSpec
from sweeps.engine.resources import Machine, ResourcePlan, plan
from sweeps.engine.sweep_plan import SweepPlan, make_plan
from sweeps.engine.task_check import TaskFacts, TaskInspector
from sweeps.search.dry_run import dry_run
from sweeps.webhook import check_webhook

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
)


@dataclass(frozen=True)
class CheckResult:
    """A valid spec, and what its sweep will take."""

    file: Path
    spec: SweepSpec
    resources: ResourcePlan
    facts: TaskFacts
    plan: SweepPlan

    @property
    def warnings(self) -> list[str]:
        """Probable mistakes, a sentence each."""
        return [
            *self.facts.cautions,
            *self.facts.checked,
            *direction_warnings(self.spec),
            *self.plan.warnings(),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "file": str(self.file),
            "name": self.spec.name,
            "resources": asdict(self.resources),
            "task": {key: getattr(self.facts, key) for key in _SHOWN_FACTS},
            "plan": self.plan.as_dict(),
            "warnings": self.warnings,
            "not_checked": messages.not_checked(self.spec),
        }

    def rendered(self) -> RenderableType:
        """Return the result as text that wraps at words."""
        facts = (self.resources.describe(), *self.facts.lines())
        keys = ", ".join(messages.not_checked(self.spec))
        return Group(
            Text(f"{self.file} is valid", style="green"),
            *(_Hanging("  ", fact) for fact in facts),
            Text("the plan"),
            *(_Hanging(f"  {word:<10}", sentence) for word, sentence in self.plan.rows()),
            *(Text(warning, style="yellow") for warning in self.warnings),
            *([_Hanging("  ", f"not checked before a run: {keys}")] if keys else []),
        )


@dataclass(frozen=True)
class _Hanging:
    """A sentence that wraps at words, below its own beginning."""

    before: str
    sentence: str

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        width = max(20, options.max_width - len(self.before))
        for number, part in enumerate(textwrap.wrap(self.sentence, width)):
            yield Text((" " * len(self.before) if number else self.before) + part)


def check_sweep(file: Path, spec: SweepSpec, err: Console, *, thorough: bool) -> CheckResult:
    """Check a spec and its task without starting a sweep.

    Args:
        file: The spec's file.
        spec: The spec.
        err: Shows a spinner.
        thorough: Whether to check the task's whole contract.

    Raises:
        UserError: The spec or the task is wrong.
    """
    dry_run(spec)
    check_tracking(spec)
    check_webhook(spec)
    machine = Machine.probe()
    resources = plan(spec.resources, spec.trials, spec.concurrency, machine)
    with err.status("loading the task"):
        facts = TaskInspector(spec, resources, thorough=thorough).facts()
    resources = plan(spec.resources, spec.trials, spec.concurrency, machine, facts.step_memory)
    sweep_plan = make_plan(spec, resources, facts, memory=machine.memory)
    return CheckResult(file, spec, resources, facts, sweep_plan)
