"""What a driver is given: how it is asked to run, a sweep whose checks have passed, a display.

What must not live here: the checks (`launch`), and running the sweep (`driver`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TextIO

from sweeps.engine.cluster import Cluster
from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.engine.sweep_plan import SweepPlan
from sweeps.engine.task_check import TaskFacts
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.reconcile.extra_training import NO_EXTRA, ExtraTraining
from sweeps.spec.resume_checks import Origin
from sweeps.spec.spec import SweepSpec
from sweeps.view.observer import ProgressObserver, ShutdownNotices


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a user asks for a run, from the command line to the driver."""

    grace: float = 30.0
    """Seconds that trials have to save after the first signal."""
    address: str | None = None
    """The Ray cluster, `HOST:PORT`; None: $RAY_ADDRESS, or this machine."""
    offline: bool = False
    """Whether this driver contacts no tracking server and no webhook."""
    accept_changes: bool = False
    """Whether a sweep resumes although its task, its code or its data has changed."""
    extra: ExtraTraining = NO_EXTRA


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A sweep right before its trials start: all checks have passed."""

    paths: SweepPaths
    spec: SweepSpec
    options: RunOptions
    new: bool
    machine: Machine | Cluster
    resources: ResourcePlan
    facts: TaskFacts
    plan: SweepPlan
    """What the whole sweep will take."""

    @property
    def origin(self) -> Origin:
        """The code and the data with which it runs."""
        return Origin(self.facts.code, self.facts.data, self.facts.samples)

    @property
    def cluster(self) -> str | None:
        """Describes the Ray cluster; None on one machine."""
        return self.machine.describe() if isinstance(self.machine, Cluster) else None

    @property
    def new_plan(self) -> SweepPlan | None:
        """What a new sweep will take, and which space is free; None for a resume."""
        if not self.new:
            return None
        in_a_store = self.spec.storage.checkpoints
        free = None if in_a_store else shutil.disk_usage(self.paths.root).free
        return replace(self.plan, disk_free_bytes=free)


class RunDisplay(Protocol):
    """Shows how a sweep starts and runs."""

    notices: ShutdownNotices

    def doing(self, activity: str) -> None:
        """Something slow begins, in a few words."""

    def warn(self, message: str) -> None:
        """A warning that needs no action."""

    def begin(
        self, prepared: PreparedSweep, before: Sequence[TrialRecord], num_trials: int
    ) -> AbstractContextManager[ProgressObserver]:
        """The trials start, after those of earlier drivers; the observer receives their progress.

        `num_trials` is how many the sweep has at most.
        """

    def cluster_unanswered(self, file: TextIO, message: str) -> None:
        """The cluster cannot be used: the process exits right after this call."""
