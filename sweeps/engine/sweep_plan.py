"""Estimate what a sweep will take before it starts: epochs, hours, memory and disk.

What must not live here: measuring (`trainable.check.first_batches`), simulating
(`stopping.simulation`), and how trials share a machine (`resources`).
"""

from __future__ import annotations

import textwrap
from dataclasses import asdict, dataclass, field
from typing import Any

from sweeps.engine.resources import ResourcePlan
from sweeps.engine.task_check import TaskFacts
from sweeps.formatting import (
    counted,
    format_bytes,
    format_device_hours,
    format_duration,
    format_number,
    joined,
)
from sweeps.spec.own_values import unwritten_values
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.spec import SweepSpec
from sweeps.stopping.simulation import SimulatedSweep, SweepShape, simulate
from trainable.config import TrialConfig

_RUNGS_SHOWN = 4
_LINE = 66  # of a terminal, beside the word
_START_SECONDS = 0.15
_REPORT_SECONDS = 0.03
"""What the start of a trial takes besides building its task, and a report besides its steps: to
choose a point, to save and to record. Measured on two CPUs with trials that train almost nothing.
"""
_CHANGES_SIZE = frozenset(
    {
        WORKERS,
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
    """The size of a sweep; of sizes and times, None is unknown.

    Attributes:
        trials: How many trials it has at most, with all seeds of each configuration.
        epochs: The reports of a trial's budget: its epochs, if each ends with a report.
        rungs: The reports at which the rule compares trials.
        epoch_seconds: From one report to the next: steps, evaluation, report.
        measured_with: The searched values of this measurement that change what a trial takes.
        defaults: Values that shape each training and that nobody wrote; see `unwritten_values`.
        ranks: What each rank of a trial holds; None where a trial is one process.
    """

    trials: int
    epochs: int
    report_word: str
    rule: str
    rungs: tuple[int, ...]
    steps_per_epoch: int
    simulation: SimulatedSweep
    patience: int | None
    trials_at_once: int
    cpu: float
    gpu: float
    epoch_seconds: float | None
    start_seconds: float
    seconds: float | None
    stop_hours: float | None
    trial_memory_bytes: int | None
    trial_gpu_bytes: int | None
    machine_memory_bytes: int | None
    checkpoint_bytes: int | None
    checkpoints_kept: int
    disk_bytes: int | None
    measured_with: dict[str, Any]
    defaults: dict[str, Any] = field(default_factory=dict)
    ranks: RankSizes | None = None
    disk_free_bytes: int | None = None
    """What the disk has free; None: unknown, or the checkpoints lie elsewhere."""

    @property
    def max_epochs(self) -> int:
        """The reports of all trials if none is stopped."""
        return self.trials * self.epochs

    @property
    def expected_epochs(self) -> float:
        """About how many reports all trials make together."""
        return self.simulation.epochs

    @property
    def trial_seconds(self) -> float | None:
        """For how long workers train the trials, all together; None if no step was measured."""
        if self.epoch_seconds is None:
            return None
        return self.expected_epochs * self.epoch_seconds + self.trials * self.start_seconds

    @property
    def device(self) -> tuple[str, float]:
        """What a trial occupies: `GPU` or `CPU`, and how many of them."""
        return ("GPU", self.gpu) if self.gpu else ("CPU", self.cpu)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers for JSON."""
        trial_seconds, (device, count) = self.trial_seconds, self.device
        return asdict(self) | {
            "expected_epochs": self.expected_epochs,
            "expected_steps": round(self.expected_epochs * self.steps_per_epoch) or None,
            "max_epochs": self.max_epochs,
            "hours": None if self.seconds is None else self.seconds / 3600,
            "device": device,
            "device_seconds": None if trial_seconds is None else trial_seconds * count,
            "ranks": None if self.ranks is None else self.ranks.as_dict(),
        }

    def expected(self) -> dict[str, Any]:
        """Return what a sweep's ledger keeps, to compare with what the sweep has taken."""
        device, count = self.device
        seconds = self.trial_seconds
        return {
            "trials": self.trials,
            "epochs": self.epochs,
            "rule": self.rule,
            "expected_epochs": round(self.expected_epochs, 1),
            "seconds": None if self.seconds is None else round(self.seconds, 3),
            "device": device,
            "device_seconds": None if seconds is None else round(seconds * count, 3),
        }

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a word and a short sentence."""
        found = [
            (
                "trials",
                f"{self.trials:,} of {counted(self.epochs, self.report_word)} each: at most "
                f"{counted(self.max_epochs, self.report_word)}",
            ),
            ("stopping", self._stopping()),
        ]
        if self.patience is not None:
            # The last report ends a trial anyway, and the first one is its best so far.
            does = "may end a trial earlier"
            if self.patience > self.epochs - 2:
                does = (
                    f"ends no trial earlier: it has only {counted(self.epochs, self.report_word)}"
                )
            found.append(("", f"patience {self.patience} {does}"))
        if self.steps_per_epoch:
            steps = self.expected_epochs * self.steps_per_epoch
            found.append(
                ("steps", f"about {steps:,.0f}: {self.steps_per_epoch:,} {self._each_report}")
            )
        words = ("defaults", *[""] * len(self.defaults))
        found += zip(words, self._defaults(), strict=False)
        found.append(("time", self._time()))
        if self.trial_seconds is not None:
            device, count = self.device
            used = format_device_hours(self.trial_seconds * count, device)
            found.append(("", f"about {used}: {format_number(count)} {device} for each trial"))
        if self.stop_hours is not None:
            found.append(("", f"stop.hours ends it after {format_number(self.stop_hours)} h"))
        if self.trial_memory_bytes is not None:
            found.append(("memory", self._memory()))
        if self.ranks is not None:
            words = ("ranks", *[""] * len(self.ranks.sentences()))
            found += zip(words, self.ranks.sentences(), strict=False)
        if self.disk_bytes is not None:
            assert self.checkpoint_bytes is not None
            found.append(
                (
                    "disk",
                    f"about {format_bytes(self.disk_bytes)}: {counted(self.trials, 'trial')} x "
                    f"{counted(self.checkpoints_kept, 'checkpoint')} of "
                    f"{format_bytes(self.checkpoint_bytes)}",
                )
            )
        if self.measured_with and self.epoch_seconds is not None:
            found.append(("", f"at {joined(self.measured_with)}; other values differ"))
        return found

    def _defaults(self) -> list[str]:
        """Return the values that nobody wrote, in short lines."""
        if not self.defaults:
            return []
        known = {
            key.removesuffix(".name").rpartition(".")[2]: v for key, v in self.defaults.items()
        }
        return textwrap.wrap(f"{joined(known)}: not in the file", _LINE)

    def in_one_line(self) -> str:
        """Return the plan in a short line."""
        found = f"plan: {counted(self.trials, 'trial')} x {counted(self.epochs, self.report_word)}"
        if round(self.expected_epochs) < self.max_epochs:
            found += f", about {self.expected_epochs:,.0f} of {self.max_epochs:,}"
        if self.seconds is not None:
            found += f"; {self._duration()}"
        if self.disk_bytes is not None:
            found += f"; disk {format_bytes(self.disk_bytes)}"
        return found

    def warnings(self) -> list[str]:
        """Return a sentence for each number that exceeds what the machine has."""
        found = []
        needed = (self.trial_memory_bytes or 0) * self.trials_at_once
        if self.machine_memory_bytes is not None and needed > self.machine_memory_bytes:
            fitting = max(1, self.machine_memory_bytes * self.trials_at_once // needed)
            found.append(
                f"{counted(self.trials_at_once, 'trial')} at a time need about "
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
        at = f"{self.rule} at {_listed(self.rungs, self.report_word)}" if self.rungs else self.rule
        found = self.simulation
        if found.epochs >= self.max_epochs:
            return f"{at}: every trial trains to the end"
        spread = (
            f", {found.least_epochs:,.0f} to {found.most_epochs:,.0f}"
            if found.least_epochs < found.most_epochs
            else ""
        )
        return f"{at}: about {counted(found.epochs, self.report_word)} (simulated{spread})"

    @property
    def _each_report(self) -> str:
        return f"{'an' if self.report_word == 'epoch' else 'a'} {self.report_word}"

    def _time(self) -> str:
        if self.epoch_seconds is None:
            return "unknown: no step was measured"
        at_once = counted(self.trials_at_once, "trial")
        return (
            f"{self._duration()}: {self.epoch_seconds:.3g} s {self._each_report}, "
            f"{at_once} at a time (estimate)"
        )

    def _duration(self) -> str:
        assert self.seconds is not None
        return (
            "less than a minute" if self.seconds < 60 else f"about {format_duration(self.seconds)}"
        )

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
) -> SweepPlan:
    """Return what a new sweep will take."""
    epochs, trials, rule = spec.budget.reports, spec.max_runs, spec.early_stopping.rule
    epoch_seconds, start_seconds = None, _START_SECONDS + facts.build_seconds
    if facts.step_seconds is not None:
        evaluation = facts.evaluation_seconds or 0.0
        epoch_seconds = facts.step_seconds * facts.steps_per_report + evaluation + _REPORT_SECONDS
    shape = SweepShape(
        epochs=epochs,
        trials=spec.num_trials,
        at_once=resources.concurrency,
        patience=spec.early_stopping.patience,
        seeds=spec.repeats.seeds,
        exempt=spec.early_stopping.exempt,
    )
    # By the spec alone: a simulation of measured times would expect other epochs each time.
    simulation = simulate(rule, shape)
    seconds = None
    if epoch_seconds is not None:
        starting = simulation.starts / min(resources.concurrency, trials) * start_seconds
        seconds = simulation.length * epoch_seconds + starting
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
        steps_per_epoch=facts.steps_per_report,
        simulation=simulation,
        patience=spec.early_stopping.patience,
        trials_at_once=resources.concurrency,
        cpu=resources.trial_cpus,
        gpu=resources.trial_gpus,
        epoch_seconds=epoch_seconds,
        start_seconds=start_seconds,
        seconds=seconds,
        stop_hours=spec.stop.hours,
        trial_memory_bytes=_times(facts.process_bytes, resources.workers),
        trial_gpu_bytes=facts.gpu_bytes,
        machine_memory_bytes=memory,
        checkpoint_bytes=size,
        checkpoints_kept=kept,
        disk_bytes=None if size is None else size * kept * trials,
        measured_with={
            key: value
            for key, value in spec.example_params().items()
            if key.startswith("task.") or key in _CHANGES_SIZE
        },
        defaults=(
            {} if facts.own_loop else unwritten_values(spec, own_optimizer=facts.own_optimizer)
        ),
        ranks=RankSizes.of(
            spec.trial_config(0, spec.example_params()), facts, fewest=resources.fewest_workers
        ),
    )


def _times(size: int | None, workers: int) -> int | None:
    return None if size is None else size * workers


def _listed(rungs: tuple[int, ...], word: str) -> str:
    shown = [str(rung) for rung in rungs[:_RUNGS_SHOWN]]
    if len(rungs) > _RUNGS_SHOWN:
        shown = [*shown[:-1], "...", str(rungs[-1])]
    return f"{word}{'s' if len(rungs) > 1 else ''} {', '.join(shown)}"


@dataclass(frozen=True)
class RankSizes:
    """The sizes of one rank of a trial.

    Whole models: each rank has all weights, gradients and optimizer state, and a copy of the
    gradients for the exchange. With `train.sharding: fsdp` each has its part of the three, and the
    block in use on top, gathered whole. Parameters are cut between rows, so the first rank's parts
    are the largest: `ceil(rows / workers)` rows of each.

    Attributes:
        workers: How many ranks a trial has; where that is searched, the most.
        micro_batch_size: The most samples that a rank takes through the model at once.
        shard_bytes: The first rank's part of the trained weights, if they are divided.
        optimizer_bytes: The optimizer's state for all of them; None: unknown.
        fewest_workers: The fewest ranks of a trial; None: all trials have as many.
    """

    workers: int
    sharded: bool
    batch_size: int
    micro_batch_size: int
    weight_bytes: int
    shard_bytes: int
    optimizer_bytes: int | None
    fewest_workers: int | None = None

    @classmethod
    def of(
        cls, config: TrialConfig, facts: TaskFacts, *, fewest: int | None = None
    ) -> RankSizes | None:
        """Return the sizes of a trial; None if it is one process, or a loop of the user's own."""
        if config.workers == 1 or facts.own_loop:
            return None
        return cls(
            workers=config.workers,
            sharded=config.train.sharding != "none",
            batch_size=config.train.batch_size,
            micro_batch_size=-(-config.train.micro_batch_size // config.workers),
            weight_bytes=facts.weight_bytes,
            shard_bytes=facts.shard_bytes,
            optimizer_bytes=facts.optimizer_bytes,
            fewest_workers=fewest,
        )

    @property
    def whole_bytes(self) -> int:
        """Weights, gradients and optimizer state of the whole model."""
        return 2 * self.weight_bytes + (self.optimizer_bytes or 0)

    @property
    def part_bytes(self) -> int:
        """The same of the first rank, if they are divided: moments are cut as the weights are."""
        return -(-self.whole_bytes * self.shard_bytes // self.weight_bytes)

    @property
    def exchange_bytes(self) -> int:
        """The copy of the gradients that ranks add up; none where they are divided."""
        return 0 if self.sharded else self.weight_bytes

    @property
    def rank_bytes(self) -> int:
        """What one rank holds besides activations."""
        return (self.part_bytes if self.sharded else self.whole_bytes) + self.exchange_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes for JSON."""
        return asdict(self) | {"rank_bytes": self.rank_bytes, "part_bytes": self.part_bytes}

    def sentences(self) -> list[str]:
        """Return the sizes in sentences."""
        least, rest = divmod(self.batch_size, self.workers)
        share = f"{least} or {least + 1}" if rest else f"{least}"
        known = "" if self.optimizer_bytes is not None else ", the optimizer's state left out"
        each = f"{format_bytes(self.rank_bytes)} of weights, gradients and optimizer state each"
        whole = " with the whole model" if self.sharded else ""
        if self.sharded:
            saved = format_bytes(self.whole_bytes - self.part_bytes)
            each = f"{each}, of {format_bytes(self.whole_bytes)}: sharding saves {saved}{known}"
        else:
            saved = format_bytes(self.rank_bytes - self.part_bytes)
            exchange = f"{format_bytes(self.exchange_bytes)} of it to exchange gradients"
            each = f"{each}, {exchange}{known}; train.sharding: fsdp would save {saved}"
        number, takes = f"{self.workers}", "each takes"
        if self.fewest_workers is not None:
            number = f"{self.fewest_workers} to {self.workers}"
            takes = f"of {self.workers}, each takes"
        return [
            f"{number} for each trial; {takes} {share} of the {self.batch_size} samples "
            f"of a step, at most {self.micro_batch_size} at a time",
            each,
            f"time and memory were measured in one process{whole}, without an exchange",
        ]
