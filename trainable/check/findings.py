"""What the check of a task is asked, and what it finds. What must not live here: torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainable.config import Section, TrialConfig


class CheckRequest(Section):
    """Trials of one task, and how they are checked."""

    config: TrialConfig
    """The trial that is built, rehearsed and measured."""
    longest_warmup: TrialConfig | None = None
    """A trial for whose schedule the run may have too few steps."""
    variants: tuple[TrialConfig, ...] = ()
    """Trials whose optimizers are rehearsed, and whose schedules are evaluated."""
    largest: TrialConfig | None = None
    """The trial of which the GPU memory of a step is measured."""
    thorough: bool = False
    """Whether the task's whole contract is checked (`testing.py`)."""
    resumed: bool = False
    """Whether the sweep exists: what it has trained with is a caution, and not refused."""


@dataclass(frozen=True)
class Findings:
    """Facts about a task; those of a custom loop are unknown."""

    num_parameters: int = 0
    num_train: int = 0
    num_val: int = 0
    steps_per_epoch: int = 0
    steps_per_report: int = 0
    total_steps: int = 0
    device: str = ""
    precision: str = ""
    weight_bytes: int = 0
    shard_bytes: int = 0
    """Bytes of the weights of the rank with the most of them, if they are cut among ranks."""
    optimizer_bytes: int | None = 0
    """Bytes of the optimizer's state; None: unknown until the optimizer has stepped."""
    own_loop: bool = False
    own_optimizer: bool = False
    """Whether the task builds its optimizer itself."""
    default_arguments: dict[str, Any] = field(default_factory=dict)
    """The default arguments of the task's constructor that are single values."""
    code: dict[str, str] = field(default_factory=dict)
    """Digests of the task's source files."""
    data: str | None = None
    """A digest that identifies the task's data; None if unknown."""
    samples: dict[str, Any] = field(default_factory=dict)
    """A summary of the task's data: lengths, some items, a collated batch of each split."""
    cautions: list[str] = field(default_factory=list)
    """Warnings about what can be trained but is probably a mistake."""
    checked: list[str] = field(default_factory=list)
    """Warnings from running the task on a few samples and on its first batches."""
    checkpoint_bytes: int = 0
    """Bytes of one checkpoint: weights, buffers and the optimizer's state."""
    step_seconds: float | None = None
    """Seconds of a step with the optimizer's update; None if it was not measured."""
    evaluation_seconds: float | None = None
    """Seconds of an evaluation, extrapolated from its first batch."""
    build_seconds: float = 0.0
    """Seconds in which the task's model and data were built."""
    process_bytes: int | None = None
    """The most memory that the process had for itself alone."""
    gpu_bytes: int | None = None
    """The GPU memory of the first steps."""
    step_memory: Any = None
    """The GPU memory that the largest trial takes (`memory_probe.py`); None: not measured."""
