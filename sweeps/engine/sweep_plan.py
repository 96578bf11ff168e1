"""What a sweep will take, before it starts: epochs, hours, memory and disk.

All numbers are estimates from the spec, its stopping rule and the first batches of the task. What
must not live here: measuring (`trainable.first_batches`), and how trials share a machine
(`resources`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sweeps.config.spec import SweepSpec
from sweeps.engine.resources import ResourcePlan
from sweeps.engine.task_check import TaskFacts
from sweeps.formatting import format_bytes, format_duration, format_number, joined

_RUNGS_SHOWN = 4
_CHANGES_SIZE = frozenset(
    {
        "train.accumulation",
        "train.activation_checkpointing",
        "train.batch_size",
        "train.optimizer.name",
        "train.precision",
    }
)
"""The searched keys, besides the task's own, that change what a trial takes."""


@dataclass(frozen=True)
class SweepPlan:
    """The size of a sweep.

    Attributes:
        trials: How many trials it has.
        epochs: The reports of a trial's budget: its epochs, if each ends with a report.
        report_word: What a report is called.
        rule: The stopping rule.
        rungs: The reports at which the rule compares trials.
        expected_epochs: About how many reports all trials make together; None: the rule cannot
            say.
        patience: After how many reports without a new best a trial ends; None: at its end.
        trials_at_once: How many trials run at once.
        epoch_seconds: From one report of a trial to the next: its steps and an evaluation; None
            if no step was measured.
        seconds: Of the whole sweep; with all reports if the expected ones are unknown.
        stop_hours: The limit of `stop.hours`; None without one.
        trial_memory_bytes: The memory of one trial; None if unknown.
        trial_gpu_bytes: Its GPU memory, without the optimizer's state; None without a GPU.
        machine_memory_bytes: The machine's memory; None on a cluster.
        checkpoint_bytes: One checkpoint; None for a custom loop.
        checkpoints_kept: How many checkpoints a trial keeps at most.
        disk_bytes: The checkpoints of all trials.
        disk_free_bytes: What the disk has free; None if the checkpoints lie elsewhere.
        measured_with: The searched values with which all this was measured, as far as they change
            what a trial takes.
    """

    trials: int
    epochs: int
    report_word: str
    rule: str
    rungs: tuple[int, ...]
    expected_epochs: float | None
    patience: int | None
    trials_at_once: int
    epoch_seconds: float | None
    seconds: float | None
    stop_hours: float | None
    trial_memory_bytes: int | None
    trial_gpu_bytes: int | None
    machine_memory_bytes: int | None
    checkpoint_bytes: int | None
    checkpoints_kept: int
    disk_bytes: int | None
    disk_free_bytes: int | None
    measured_with: dict[str, Any]

    @property
    def max_epochs(self) -> int:
        """The reports of all trials if none is stopped."""
        return self.trials * self.epochs

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        hours = None if self.seconds is None else self.seconds / 3600
        return asdict(self) | {"max_epochs": self.max_epochs, "hours": hours}

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a word and a short sentence."""
        found = [
            (
                "trials",
                f"{self.trials:,} of {_counted(self.epochs, self.report_word)} each: at most "
                f"{_counted(self.max_epochs, self.report_word)}",
            ),
            ("stopping", self._stopping()),
        ]
        if self.patience is not None:
            # The last report ends a trial anyway, and the first one is its best so far.
            does = "may end a trial earlier"
            if self.patience > self.epochs - 2:
                does = (
                    f"ends no trial earlier: it has only {_counted(self.epochs, self.report_word)}"
                )
            found.append(("", f"patience {self.patience} {does}"))
        found.append(("time", self._time()))
        if self.stop_hours is not None:
            found.append(("", f"stop.hours ends it after {format_number(self.stop_hours)} h"))
        if self.trial_memory_bytes is not None:
            found.append(("memory", self._memory()))
        if self.disk_bytes is not None:
            assert self.checkpoint_bytes is not None
            found.append(
                (
                    "disk",
                    f"about {format_bytes(self.disk_bytes)}: {_counted(self.trials, 'trial')} x "
                    f"{_counted(self.checkpoints_kept, 'checkpoint')} of "
                    f"{format_bytes(self.checkpoint_bytes)}",
                )
            )
        if self.measured_with and self.epoch_seconds is not None:
            found.append(("", f"at {joined(self.measured_with)}; other values differ"))
        return found

    def in_one_line(self) -> str:
        """Return the plan in a short line."""
        found = (
            f"plan: {_counted(self.trials, 'trial')} x {_counted(self.epochs, self.report_word)}"
        )
        if self.expected_epochs is not None and self.expected_epochs < self.max_epochs:
            found += f", about {self.expected_epochs:,.0f} of {self.max_epochs:,}"
        if self.seconds is not None:
            found += f"; {self._duration()}"
        if self.disk_bytes is not None:
            found += f"; {format_bytes(self.disk_bytes)} on disk"
        return found

    def warnings(self) -> list[str]:
        """Return a sentence for each number that exceeds what the machine has."""
        found = []
        needed = (self.trial_memory_bytes or 0) * self.trials_at_once
        if self.machine_memory_bytes is not None and needed > self.machine_memory_bytes:
            fitting = max(1, self.machine_memory_bytes * self.trials_at_once // needed)
            found.append(
                f"{_counted(self.trials_at_once, 'trial')} at a time need about "
                f"{format_bytes(needed)} of memory, and the machine has "
                f"{format_bytes(self.machine_memory_bytes)}: trials would be killed; write "
                f"concurrency: {fitting}"
            )
        if self.disk_free_bytes is not None and (self.disk_bytes or 0) > self.disk_free_bytes:
            found.append(
                f"the checkpoints need about {format_bytes(self.disk_bytes or 0)}, and the disk "
                f"has {format_bytes(self.disk_free_bytes)} free: the sweep would stop when it is "
                "full; lower checkpoint.keep, or choose another --root"
            )
        return found

    def _stopping(self) -> str:
        if self.expected_epochs is None:
            return f"{self.rule}: how many {self.report_word}s depends on the curves"
        at = f"{self.rule} at {_listed(self.rungs, self.report_word)}" if self.rungs else self.rule
        if self.expected_epochs >= self.max_epochs:
            return f"{at}: every trial trains to the end"
        return f"{at}: about {self.expected_epochs:,.0f} {self.report_word}s (estimate)"

    def _time(self) -> str:
        if self.epoch_seconds is None:
            return "unknown: no step was measured"
        at_once = _counted(self.trials_at_once, "trial")
        article = "an" if self.report_word == "epoch" else "a"
        return (
            f"{self._duration()}: {self.epoch_seconds:.3g} s {article} {self.report_word}, "
            f"{at_once} at a time (estimate)"
        )

    def _duration(self) -> str:
        assert self.seconds is not None
        limit = "at most " if self.expected_epochs is None else "about "
        return "less than a minute" if self.seconds < 60 else limit + format_duration(self.seconds)

    def _memory(self) -> str:
        assert self.trial_memory_bytes is not None
        gpu = (
            f"; {format_bytes(self.trial_gpu_bytes)} of its GPU"
            if self.trial_gpu_bytes is not None
            else ""
        )
        each = f"about {format_bytes(self.trial_memory_bytes)} for each trial"
        if self.trials_at_once == 1:
            return each + gpu
        return (
            f"{each}, {format_bytes(self.trial_memory_bytes * self.trials_at_once)} for "
            f"{self.trials_at_once}{gpu}"
        )


def make_plan(
    spec: SweepSpec,
    resources: ResourcePlan,
    facts: TaskFacts,
    *,
    memory: int | None,
    disk_free: int | None = None,
) -> SweepPlan:
    """Return what a new sweep will take.

    Args:
        spec: The sweep.
        resources: The resources of each trial, and how many run at once.
        facts: What its first batches showed.
        memory: The machine's memory in bytes; None on a cluster.
        disk_free: The bytes free where the sweep will be; None if unknown.
    """
    epochs, trials, rule = spec.budget.reports, spec.max_runs, spec.early_stopping.rule
    expected = rule.expected_epochs(epochs, spec.num_trials)
    complete = rule.expected_complete(epochs, spec.num_trials)
    if expected is not None and complete is not None:
        # Configurations that train to the end with their first seed get the others.
        expected += (spec.repeats.seeds - 1) * complete * epochs
    epoch_seconds = seconds = None
    if facts.step_seconds is not None:
        evaluation = facts.evaluation_seconds or 0.0
        epoch_seconds = facts.step_seconds * facts.steps_per_report + evaluation
        total = expected if expected is not None else trials * epochs
        # no sweep ends before one trial has trained to the end
        seconds = epoch_seconds * max(total / resources.concurrency, epochs)
    kept = spec.checkpoint.keep + 1  # and the best
    if spec.checkpoint.every.unit == spec.budget.report_word:
        kept = min(kept, epochs)
    size = facts.checkpoint_bytes or None
    return SweepPlan(
        trials=trials,
        epochs=epochs,
        report_word=spec.budget.report_word,
        rule=rule.name,
        rungs=rule.rungs(epochs),
        expected_epochs=expected,
        patience=spec.early_stopping.patience,
        trials_at_once=resources.concurrency,
        epoch_seconds=epoch_seconds,
        seconds=seconds,
        stop_hours=spec.stop.hours,
        trial_memory_bytes=facts.process_bytes,
        trial_gpu_bytes=facts.gpu_bytes,
        machine_memory_bytes=memory,
        checkpoint_bytes=size,
        checkpoints_kept=kept,
        disk_bytes=None if size is None else size * kept * trials,
        disk_free_bytes=None if spec.storage.checkpoints else disk_free,
        measured_with={
            key: value
            for key, value in spec.example_params().items()
            if key.startswith("task.") or key in _CHANGES_SIZE
        },
    )


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def _listed(rungs: tuple[int, ...], word: str) -> str:
    shown = [str(rung) for rung in rungs[:_RUNGS_SHOWN]]
    if len(rungs) > _RUNGS_SHOWN:
        shown = [*shown[:-1], "...", str(rungs[-1])]
    return f"{word}{'s' if len(rungs) > 1 else ''} {', '.join(shown)}"
