"""Make a sweep's directory without running anything."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from optuna.samplers import RandomSampler

from sweeps.engine.resources import Machine, ResourcePlan
from sweeps.engine.sweep_plan import make_plan
from sweeps.engine.task_check import TaskFacts
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.over_seeds import repeats_of
from sweeps.ledger.trials import Ending
from sweeps.paths import SweepPaths
from sweeps.run.prepared import PreparedSweep, RunDisplay, RunOptions
from sweeps.spec.resume_checks import Origin
from sweeps.spec.revisions import write_spec
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.schedulers import make_scheduler
from sweeps.view.observer import ShutdownNotices
from sweeps.view.sweep_view import SweepView
from tests.make_trials import proposal
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, Row

if TYPE_CHECKING:
    from sweeps.run.session import SweepSession
    from sweeps.run.tune_callbacks import TuneEventHandler

SPEC = """
name: {name}
task: digits
metric: {metric}
mode: {mode}
trials: 3
budget: {budget}
space: {space}
{more}
"""
RATE = "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}"


class MadeSweep:
    """A sweep with a ledger to which trials are added by hand."""

    def __init__(
        self,
        root: Path,
        name: str = "small",
        *,
        space: str = RATE,
        metric: str = "val/loss",
        mode: str = "min",
        budget: str = "{epochs: 10}",
        more: str = "",
    ) -> None:
        self.paths = SweepPaths(root, name)
        text = SPEC.format(
            name=name, space=space, metric=metric, mode=mode, budget=budget, more=more
        )
        self.spec = parse_spec(text, f"{name}.yaml")
        self.paths.directory.mkdir(parents=True)
        self.ledger = Ledger.create(
            self.paths.ledger,
            mode=self.spec.mode,
            sweep_id=f"id-{name}",
            select=self.spec.select,
            repeats=repeats_of(self.spec),
            limits=self.spec.limits,
        )
        write_spec(self.paths.spec, self.spec)

    def copy(self, root: Path) -> MadeSweep:
        """Copy the sweep, of which nothing is being written, into another root."""
        made = copy.copy(self)
        made.paths = SweepPaths(root, self.paths.name)
        shutil.copytree(self.paths.directory, made.paths.directory)
        made.ledger = Ledger.open(made.paths.ledger)
        return made

    def add(
        self,
        ending: Ending | None,
        *values: float | Sequence[float],
        reason: str | None = None,
        params: dict[str, Any] | None = None,
    ) -> int:
        """Add a trial that reported `values` and so ended, or did not; returns its number.

        With several metrics, each report is a sequence. Without `params`, they are random.
        """
        space = {key: value.to_optuna() for key, value in self.spec.space.items()}
        if params is None:
            drawn = proposal(space, RandomSampler(seed=len(self.ledger.trials())))
        else:
            drawn = Suggestion(params, {key: space[key] for key in params})

        def store() -> int:
            number = self.ledger.add(drawn).number
            for epoch, reported in enumerate(values, start=1):
                value, *others = reported if isinstance(reported, Sequence) else [reported]
                self.ledger.report(
                    number, epoch=epoch, step=epoch * 10, value=value, others=others
                )
            if ending is not None:
                self.ledger.finish(number, ending, reason=reason)
            return number

        return self.ledger.transaction(store)

    def repeat(self, first: int, ending: Ending | None, *values: float) -> int:
        """Add a further seed of a configuration; returns its number."""
        index = 1 + sum(trial.origin == first for trial in self.ledger.trials())
        number = self.ledger.add_extra("repeat", first, index).number
        for epoch, value in enumerate(values, start=1):
            self.ledger.report(number, epoch=epoch, step=epoch * 10, value=value)
        if ending is not None:
            self.ledger.finish(number, ending)
        return number

    def log(self, number: int, *rows: Row) -> None:
        """Write a trial's rows."""
        directory = self.paths.trial(number)
        directory.mkdir(parents=True, exist_ok=True)
        files = LocalFiles.of(directory)
        files.open()
        history = History(directory, files, step=0)
        history.append(rows)
        history.close()

    @property
    def view(self) -> SweepView:
        return SweepView(self.paths)

    def session(self, recorder: Any, fence: Callable[[], None] = lambda: None) -> SweepSession:
        """The sweep as its driver has opened it; nothing is delivered."""
        from sweeps.run.session import SweepSession

        return SweepSession(self.paths, self.spec, self.ledger, recorder, fence)

    def handler(self, recorder: Any, observer: Any, **workers: Any) -> TuneEventHandler:
        """What receives the events of the sweep's trials from Tune."""
        from sweeps.run.tune_callbacks import TuneEventHandler
        from sweeps.run.worker_watch import WorkerRules

        rules, scheduler = WorkerRules(**workers), make_scheduler(self.spec)
        session = self.session(recorder)
        return TuneEventHandler(session, observer, scheduler, rules, on_step=lambda: None)


def prepared(
    paths: SweepPaths,
    spec: SweepSpec,
    *,
    new: bool = False,
    origin: Origin = Origin(),  # noqa: B008  # frozen
    max_workers: int = 1000,
    **options: Any,
) -> PreparedSweep:
    """Return a sweep whose checks have passed, without having made them."""
    resources = ResourcePlan(1, 0, 1, capacity=max_workers)
    facts = TaskFacts(code=dict(origin.code), data=origin.data, samples=dict(origin.samples))
    return PreparedSweep(
        paths=paths,
        spec=spec,
        options=RunOptions(**options),
        new=new,
        machine=Machine.probe(),
        resources=resources,
        facts=facts,
        plan=make_plan(spec, resources, facts, memory=None),
    )


class RunsNoTrial(RunDisplay):
    """Shows nothing, and fails if a trial is to run."""

    notices = ShutdownNotices()

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def doing(self, activity: str) -> None:
        del activity

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def begin(self, *_: object) -> NoReturn:
        pytest.fail("a trial was to be run")

    def cluster_unanswered(self, *_: object) -> None:
        raise AssertionError
