"""What can only be known by loading the task, asked of a child process.

The command line never imports torch: a child loads the task, builds model and data once, and
answers in JSON. Its memory is gone when it ends. What must not live here: checks that need no
torch (spec, resources).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from sweeps.spec import SweepSpec


class TaskRefused(ValueError):
    """The task cannot be loaded, or cannot be trained as configured."""


@dataclass(frozen=True)
class Facts:
    """What the task is, in numbers."""

    num_parameters: int
    num_train: int
    num_val: int
    steps_per_epoch: int
    total_steps: int
    device: str
    precision: str
    optimizer_bytes: int

    def lines(self) -> list[str]:
        """The facts in sentences."""
        return [
            f"{self.num_parameters:,} parameters; "
            f"the optimizer keeps {self.optimizer_bytes / 2**20:.1f} MiB for them",
            f"{self.num_train:,} training and {self.num_val:,} validation samples",
            f"{self.steps_per_epoch:,} steps per epoch, {self.total_steps:,} in all",
            f"{self.precision} on {self.device}",
        ]


def inspect(spec: SweepSpec) -> Facts:
    """Load the task in a child process and build everything a run would build.

    Raises:
        TaskRefused: It cannot be loaded or trained as configured; the message says why.
    """
    config = spec.trial_config(0, spec.example_params())
    answer = _ask(config.model_dump_json())
    if "refused" in answer:
        raise TaskRefused(f"task '{spec.task.name}': {answer['refused']}")
    return Facts(**answer)


def _ask(config: str) -> dict[str, Any]:
    path = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    child = subprocess.run(
        [sys.executable, "-m", "trainable.preflight"],
        input=config,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    try:
        answer: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        last = (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        raise TaskRefused(f"loading the task ended its process: {last}") from None
    return answer
