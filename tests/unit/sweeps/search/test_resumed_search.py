"""Serial search after a kill of the driver: suggestions and rungs equal those of one driver."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from sweeps.ledger.attributes import WOULD_STOP
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.storage import StudyStorage
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.reconcile import reconcile
from sweeps.reconcile.repairs import apply
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher, replayed_scheduler
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.asha import FrontStopper
from sweeps.stopping.rule import JudgingStopper
from sweeps.stopping.schedulers import make_verdict_fn
from tests.curves import append_rows
from tests.fake_checkpoints import commit
from tests.memory_recorder import MemoryRecorder
from trainable.checkpoint import CheckpointStore
from trainable.store.metrics_file import Row

SPEC = """
name: quad
task: digits
metric: val/loss
mode: min
trials: 9
seed: 3
budget: {epochs: 4}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
  train.schedule.warmup: {uniform: [0.0, 0.3]}
search: {sampler: SAMPLER, startup_trials: 3}
early_stopping: {scheduler: SCHEDULER, grace_epochs: 1, reduction: 2}
"""
SIZE = "val/size"  # a second metric
BEFORE = 7  # trials in the ledger that every case starts from
WRITES = (
    "add_trial",
    "set_param",
    "add_value",
    "set_attribute",
    "end_trial",
)


class Died(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def _loss(params: dict[str, Any], epoch: int) -> float:
    distance = (params["train.optimizer.lr"] - 0.01) ** 2 + params["train.clip.max_norm"] / 100
    return float(distance + params["train.schedule.warmup"] + 1 / epoch)


def _values(spec: SweepSpec, params: dict[str, Any], epoch: int) -> tuple[float, ...]:
    """The value of each reported metric; the more, the better, is the second one."""
    loss = _loss(params, epoch)
    return (loss, params["train.clip.max_norm"] - 1 / epoch)[: len(spec.reported)]


class Driver:
    """A serial sweep: one trial at a time, whose every report the scheduler judges.

    Its trials are saved before they report, or else (`late`) once they were told to go on.
    """

    def __init__(self, paths: SweepPaths, spec: SweepSpec, *, late: bool = False) -> None:
        self.paths, self.late = paths, late
        new = not paths.ledger.exists()
        self.ledger = (
            Ledger.create(paths.ledger, mode=spec.modes, sweep_id="s", limits=spec.limits)
            if new
            else Ledger.open(paths.ledger)
        )
        self.spec = spec

        judge = make_verdict_fn(spec)
        state = read_sweep_state(paths, spec, self.ledger.trials(), live=False, judge=judge)
        apply(
            reconcile(state),
            paths, spec, self.ledger, MemoryRecorder(),
        )  # fmt: skip
        self.scheduler = replayed_scheduler(
            spec,
            self.ledger.trials(),
            lambda number: CheckpointStore(paths.trial(number)).saved_epoch(),
        )
        self.searcher = LedgerSearcher(
            self.ledger,
            spec,
            paths,
            DriverCallbacks(fence=lambda: None, refuse=lambda *_: None),
            Capacity(1, 1),
        )

    def run(self) -> None:
        for turn in itertools.count():
            trial: Any = _Named(f"turn-{turn}")
            config = self.searcher.suggest(trial.trial_id)
            if config == Searcher.FINISHED:
                break
            trial.config = config
            self.scheduler.on_trial_add(None, trial)
            self._train(trial, config["number"], config["params"])
            self.searcher.on_trial_complete(trial.trial_id)

        for number, reason in self.searcher.never_promoted().items():
            self.ledger.finish(number, "pruned", reason=reason)

    def rungs(self) -> Any:
        """What was recorded at each rung."""
        if not self.scheduler.compares:
            return {}  # trials pause
        stopper: Any = self.scheduler._stopper
        if isinstance(stopper, JudgingStopper):
            stopper = stopper.rule
        if isinstance(stopper.rule, FrontStopper):
            return {
                at: dict(
                    zip(
                        numbers,
                        zip(fronts.ranks, fronts.points.tolist(), strict=True),
                        strict=True,
                    )
                )
                for at, (fronts, numbers) in stopper.rule._seen.items()
            }
        return stopper.rule._losses

    def _train(self, trial: Any, number: int, params: dict[str, Any]) -> None:
        directory = self.paths.trial(number)
        until = trial.config["pause_at_epoch"]
        last = until or self.spec.budget.epochs
        for epoch in range(1 + CheckpointStore(directory).saved_epoch(), last + 1):
            values = _values(self.spec, params, epoch)
            if not self.late or epoch == last:
                self._save(directory, epoch, values)
            result = {"epoch": epoch, "objective": values[0], "objectives": values}
            verdict = self.scheduler.on_trial_result(None, trial, result)
            self.ledger.transaction(partial(self._report, number, epoch, values))
            if verdict == TrialScheduler.STOP:
                self.ledger.finish(number, "pruned")
                return
            if self.late and epoch < last:
                self._save(directory, epoch, values)
        if until is None:
            self.ledger.finish(number, "complete")

    def _report(self, number: int, epoch: int, values: tuple[float, ...]) -> None:
        """Tell a report, and with it where an exempt trial would have been stopped."""
        self.ledger.report(number, epoch=epoch, step=epoch, value=values[0], others=values[1:])
        spared = self.scheduler.would_stop.get(number)
        if spared is not None and spared.epoch == epoch:
            self.ledger.set_attr(number, WOULD_STOP, list(spared))

    def _save(self, directory: Path, epoch: int, values: tuple[float, ...]) -> None:
        metrics = dict(zip(self.spec.reported, values, strict=True))
        append_rows(directory, [Row(epoch, 0, {**metrics, "epoch": epoch})])
        commit(directory, epoch, step=epoch)


class _Named:
    def __init__(self, trial_id: str) -> None:
        self.trial_id = trial_id


CASES = [
    ("tpe", "asha"),
    ("cmaes", "asha"),
    ("tpe", "asha_promote", "two metrics"),
    ("tpe", "asha", "limited"),
]
IN_CHAOS = [
    *[(sampler, "asha") for sampler in ("nsgaii", "random", "qmc", "gp")],
    ("tpe", "asha_promote"),
    ("tpe", "asha", "two metrics"),
    *[(sampler, "asha", "limited") for sampler in ("nsgaii", "gp")],
    ("tpe", "asha_promote", "limited"),
]


@pytest.fixture(
    params=[*CASES, *(pytest.param(case, marks=pytest.mark.chaos) for case in IN_CHAOS)],
    ids="-".join,
    scope="module",
)
def sweep(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SweepSpec, Path, Path]:
    """A spec, a ledger of its first trials, and the ledger that one driver would have written."""
    sampler, scheduler, *more = request.param
    root = tmp_path_factory.mktemp(sampler)
    text = SPEC.replace("SAMPLER", sampler).replace("SCHEDULER", scheduler)
    if more == ["limited"]:
        text += f"constraints: {{{SIZE}: {{min: 1}}}}\n"
    elif more:
        text = text.replace("val/loss", f"[val/loss, {SIZE}]").replace(
            "mode: min", "mode: [min, max]"
        )
        text = text.replace("reduction: 2}", "reduction: 2, exempt: 0.2}")
        text = text.replace("1.0e-1]}", "1.0e-1], prior: 1.0e-2}")
    spec = parse_spec(text, "quad.yaml")
    once, begun = SweepPaths(root / "once", "quad"), SweepPaths(root / "begun", "quad")
    for paths in (once, begun):
        paths.directory.mkdir(parents=True)
    Driver(begun, spec.model_copy(update={"trials": BEFORE})).run()
    shutil.copy(begun.ledger, once.ledger)
    Driver(once, spec).run()
    return spec, begun.ledger, once.ledger


def _killing(monkeypatch: pytest.MonkeyPatch, at: int) -> Callable[[], None]:
    """Let the process die right after its write number `at`; returns what disarms it."""
    left = at

    def wrap(name: str) -> None:
        real = getattr(StudyStorage, name)

        def write(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            done = real(*args, **kwargs)
            left -= 1
            if left == 0:
                raise Died
            return done

        monkeypatch.setattr(StudyStorage, name, write)

    for name in WRITES:
        wrap(name)
    return monkeypatch.undo


def test_search_and_rungs_survive_a_kill(
    sweep: tuple[SweepSpec, Path, Path], tmp_path: Path
) -> None:
    # With the trial there, its first report half told, between it and the verdict on it, later.
    slow = sweep[0].search.sampler == "gp"
    _assert_equal_after_death(sweep, tmp_path, [1] if slow else [1, 2, 3, 7])
    if sweep[0].search.sampler == "tpe":  # the same if the last report's checkpoint was lost
        _assert_equal_after_death(sweep, tmp_path / "late", [2, 3, 4, 5], late=True)


@pytest.mark.chaos
def test_search_and_rungs_survive_a_kill_at_any_write(
    sweep: tuple[SweepSpec, Path, Path], tmp_path: Path
) -> None:
    _assert_equal_after_death(sweep, tmp_path, range(1, 14))


def _assert_equal_after_death(
    sweep: tuple[SweepSpec, Path, Path],
    root: Path,
    points: Iterable[int],
    *,
    late: bool = False,
) -> None:
    spec, begun, once = sweep
    expected = [(t.state, t.params, t.reports) for t in Ledger.open(once).trials()]
    rungs = Driver(_copied(once, root / "once"), spec).rungs()
    assert len(expected) == spec.trials
    assert sum(len(reports) for _, _, reports in expected) > 1.5 * spec.trials
    assert {state for state, _, _ in expected} == {"complete", "pruned"}
    assert bool(rungs) == (spec.early_stopping.scheduler == "asha")
    for point in points:
        paths = _copied(begun, root / str(point))
        with pytest.MonkeyPatch.context() as patched:
            disarm = _killing(patched, point)
            try:
                Driver(paths, spec, late=late).run()
            except Died:
                disarm()
            else:  # how many writes are left depends on what is drawn
                assert point > 7
                break
        resumed = Driver(paths, spec, late=late)
        resumed.run()
        found = [(t.state, t.params, t.reports) for t in resumed.ledger.trials()]
        assert found == expected, f"died after write {point}"
        assert resumed.rungs() == rungs, f"died after write {point}"


def _copied(ledger: Path, root: Path) -> SweepPaths:
    """A sweep whose ledger is a copy."""
    paths = SweepPaths(root, "quad")
    paths.directory.mkdir(parents=True)
    shutil.copy(ledger, paths.ledger)
    return paths
