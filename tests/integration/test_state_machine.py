"""A sweep under random faults keeps its invariants.

Real are the ledger, the curves, the manifests, the outbox and its delivery, the searcher, the
scheduler, the bookkeeper and the reconciliation. Stand-ins are Ray (its calls are made here),
training (a hash chain instead of weights) and the tracking server (`disk_server.py`).

    U1  every sound checkpoint continues the one chain of its trial
    U2  every (run, metric, step) is recorded once, with its value
    U3  exactly N trials, one end each, one run each

`-m chaos` runs the long version. A failure prints the calls that lead to it, and a line
`@reproduce_failure(...)` or `--hypothesis-seed=N` by which it is replayed.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ray.tune.schedulers import TrialScheduler
from ray.tune.search import Searcher

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.storage import StudyStorage
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.reconcile.collect_state import read_sweep_state
from sweeps.reconcile.reconcile import reconcile
from sweeps.reconcile.repairs import apply, follow_logs
from sweeps.recording.tags import run_status
from sweeps.run.session import SweepSession
from sweeps.run.tune_callbacks import TuneEventHandler
from sweeps.run.worker_watch import WorkerRules
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher, replayed_scheduler
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.schedulers import make_scheduler, make_verdict_fn
from tests.unit.tracking.disk_server import DiskServer
from tracking.delivery import Delivery
from tracking.outbox import Outbox
from tracking.recorder import Recorder
from tracking.tracker import TrackedSweep
from trainable.checkpoint import CheckpointStore
from trainable.store.local import LocalFiles
from trainable.store.manifest import STATE, Generation, format_manifest, read_state
from trainable.store.metrics_file import History, Row, read_rows

SPEC = """
name: quad
task: digits
metric: val/loss
mode: min
trials: 3
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.clip.max_norm: {loguniform: [0.1, 10]}
search: {sampler: tpe, startup_trials: 2}
early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 2}
"""
EPOCHS, STEPS, KEPT, MOST_TRIALS = 3, 2, 3, 6
LR = "train.optimizer.lr"


class Died(BaseException):
    """Stands for SIGKILL of the driver and all that it started: nothing catches it."""


class Fuse:
    """Dies at a chosen one of the operations that persist something, before or after it."""

    def __init__(self) -> None:
        self.left: int | None = None

    def wrap(self, patched: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            self.burn()
            done = real(*args, **kwargs)
            self.burn()
            return done

        patched.setattr(owner, name, operation)

    def burn(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise Died


FUSE = Fuse()
PERSISTING = [
    (StudyStorage, "add_trial"),
    (StudyStorage, "set_param"),
    (StudyStorage, "set_attribute"),
    (StudyStorage, "add_value"),
    (StudyStorage, "end_trial"),
    (Outbox, "append"),
    (Outbox, "follow"),
    (Outbox, "prepare"),
    (Outbox, "next_batch"),
    (Outbox, "delivered"),
    (Outbox, "set_run_id"),
    (History, "append"),
    (LocalFiles, "replace"),
]


@pytest.fixture(autouse=True, scope="module")
def _fused() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.fsync", lambda _: None)  # processes die here, power does not fail
        for owner, name in PERSISTING:
            FUSE.wrap(patched, owner, name)
        yield


def loss_of(params: dict[str, Any], step: int) -> float:
    """The value that training reaches at a step, whoever trains it and however often."""
    text = f"{params[LR]!r} {step}"
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) / 2**32


def chain_of(params: dict[str, Any], step: int) -> str:
    """The state after a step: a hash chain that no shortcut reaches."""
    state = repr(params[LR])
    for number in range(1, step + 1):
        state = hashlib.sha256(f"{state} {number}".encode()).hexdigest()
    return state


class Lagging:
    """Stands for the thread that writes: it writes when somebody flushes, or is let. Whoever dies
    leaves unwritten what waits.
    """

    def __init__(self, write: Callable[[list[Any]], None]) -> None:
        self._write = write
        self._waiting: list[Any] = []

    def put(self, what: Any) -> None:
        self._waiting.append(what)

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._write(waiting)


class Training:
    """One worker's run of a trial: resumes, steps, saves and reports as the real one does."""

    def __init__(self, directory: Path, params: dict[str, Any]) -> None:
        self._directory, self._params = directory, params
        newest = CheckpointStore(directory).newest()
        files = LocalFiles.of(directory)
        saved = (
            json.loads(read_state(files, newest) or b"") if newest else {"step": 0, "reported": 0}
        )
        self.step, self._reported = saved["step"], saved["reported"]
        self._chain = saved.get("chain", chain_of(params, 0))
        files.open()
        self._history = History(directory, files, step=self.step)
        self._unreported = [row for row in read_rows(directory) if row.step > self._reported]

    @property
    def epoch(self) -> int:
        return self.step // STEPS

    def advance(self) -> dict[str, Any] | None:
        """Take a step; return the result that Tune would get at the end of an epoch."""
        if self.epoch >= EPOCHS:
            return self._result([])
        self.step += 1
        self._chain = hashlib.sha256(f"{self._chain} {self.step}".encode()).hexdigest()
        metrics = {"train/loss": loss_of(self._params, self.step)}
        if end_of_epoch := self.step % STEPS == 0:
            metrics |= {"val/loss": metrics["train/loss"], "epoch": float(self.epoch)}
        row = Row(self.step, 1000 + self.step, metrics)
        self._history.append([row])
        self._unreported.append(row)
        if not end_of_epoch:
            return None
        self._reported = self.step
        rows, self._unreported = self._unreported, []
        self.save()
        return self._result(rows)

    def save(self) -> None:
        """Commit a generation and remove what is older than the last few."""
        state = {"step": self.step, "reported": self._reported, "chain": self._chain}
        content = json.dumps(state).encode()
        room = self._directory / "checkpoints"
        kept = CheckpointStore(self._directory).generations()
        path, revision = room / f"step-{self.step:08d}", 0
        while path.exists():
            revision += 1
            path = room / f"step-{self.step:08d}.{revision}"
        aside = room / f".aside-{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        (aside / STATE).write_bytes(content)
        FUSE.burn()
        generation = Generation(
            path, 1 + max((g.number for g in kept), default=0), self.step, self.epoch,
            "val/loss", "min", None, len(content), hashlib.sha256(content).hexdigest(),
        )  # fmt: skip
        (aside / "manifest.json").write_bytes(format_manifest(generation))
        FUSE.burn()
        aside.rename(path)
        FUSE.burn()
        for old in kept[: 1 - KEPT]:
            shutil.rmtree(old.path)

    def close(self) -> None:
        self._history.close()

    def _result(self, rows: list[Row]) -> dict[str, Any]:
        value = loss_of(self._params, self.epoch * STEPS)
        result = {
            "objective": value, "epoch": self.epoch, "step": self.step,
            "metrics": {"val/loss": value}, **({"signals": []} if rows else {}),
        }  # fmt: skip
        finished = self.epoch >= EPOCHS
        return result | ({"ending": "finished", "saved": True} if finished else {})


class Driver:
    """What `run_sweep` does with Ray's calls made one by one."""

    def __init__(self, paths: SweepPaths, spec: SweepSpec, server: DiskServer) -> None:
        self.paths = paths
        self.ledger = Ledger.open(paths.ledger)
        self.live: dict[int, tuple[Any, Training]] = {}
        self.exhausted = False
        self._turn = 0
        self.recorder = Recorder(
            "unused",
            None,
            TrackedSweep(experiment="quad", sweep_id="s", outbox=paths.outbox),
            deliver=None,
        )
        self._queue = Outbox(paths.outbox, delivers=True)  # as the process has it that delivers
        try:
            self._begin(spec, server)
        except Died:
            self.die()
            raise

    def _begin(self, spec: SweepSpec, server: DiskServer) -> None:
        paths = self.paths
        self.delivery = Delivery(self._queue, server, sweep_id="s", name="q")

        judge = make_verdict_fn(spec)
        state = read_sweep_state(paths, spec, self.ledger.trials(), live=False, judge=judge)
        apply(
            reconcile(state),
            paths, spec, self.ledger, self.recorder,
        )  # fmt: skip
        follow_logs(state, spec, self.recorder)
        left = reconcile(
            read_sweep_state(paths, spec, self.ledger.trials(), live=False, judge=judge)
        )
        assert left == [], "what was put right is right"
        self._scheduler = replayed_scheduler(
            spec,
            self.ledger.trials(),
            lambda number: CheckpointStore(paths.trial(number)).saved_epoch(),
        )
        self.searcher = LedgerSearcher(
            self.ledger,
            spec,
            paths,
            DriverCallbacks(
                fence=lambda: None,
                refuse=lambda *told: self._book.refuse(*told),
                flush=lambda: self._book.flush(),
            ),
            Capacity(2, 1),
        )
        view: Any = SimpleNamespace(
            started=lambda *_: None, reported=lambda *_: None, ended=lambda *_: None
        )
        self._book = TuneEventHandler(
            SweepSession(paths, spec, self.ledger, self.recorder, lambda: None),
            view,
            make_scheduler(spec),
            WorkerRules(),
            on_step=lambda: None,
        )
        self._book._queue = Lagging(self._book._event_writer.write)  # type: ignore[assignment]

    def write(self) -> None:
        """What waits is written."""
        self._book.flush()

    def suggest(self) -> None:
        self._turn += 1
        trial = SimpleNamespace(trial_id=f"turn-{self._turn}", last_result={})
        config: Any = self.searcher.suggest(trial.trial_id)
        if config is None:
            return
        if config == Searcher.FINISHED:
            self.exhausted = True
            return
        trial.config = config
        self._scheduler.on_trial_add(None, trial)
        self._start(trial)

    def advance(self, number: int) -> None:
        trial, training = self.live[number]
        result = training.advance()
        if result is None:
            return
        stopped = "ending" not in result and (
            self._scheduler.on_trial_result(None, trial, result) == TrialScheduler.STOP
        )
        trial.last_result = result
        self._book.on_trial_result(0, [], trial, result)
        if stopped or "ending" in result:
            self._end(number)

    def replace_worker(self, number: int, *, untold: bool) -> None:
        """The worker is lost, perhaps with a report that it could not tell, and started again."""
        trial, training = self.live[number]
        if untold:
            training.advance()
        training.close()
        self._start(trial)

    def stop(self) -> None:
        """Trials save where they are and end; the driver leaves."""
        self.searcher.stopping = True
        for number in sorted(self.live):
            trial, training = self.live[number]
            training.save()
            trial.last_result = {"ending": "interrupted"}
            self._end(number)
        self.write()
        self.die()

    def deliver(self, enough: Callable[[], bool] = lambda: False) -> None:
        try:
            self.delivery.connect()
            self.delivery.drain(enough)
        except ConnectionError:
            self.delivery.disconnect()

    def die(self) -> None:
        """Give back what this process holds; a killed one's is taken by the kernel."""
        for _, training in self.live.values():
            training.close()
        self.recorder.close(0.0)
        self._queue.close()

    def _start(self, trial: Any) -> None:
        number = trial.config["number"]
        self._book.on_trial_start(0, [], trial)
        training = Training(self.paths.trial(number), trial.config["params"])
        self.live[number] = trial, training

    def _end(self, number: int) -> None:
        trial, training = self.live.pop(number)
        training.close()
        self._book.on_trial_complete(0, [], trial)
        self._scheduler.on_trial_remove(None, trial)
        self.searcher.on_trial_complete(trial.trial_id)


class SweepMachine(RuleBasedStateMachine):
    """What may happen to a sweep, in any order."""

    def __init__(self) -> None:
        super().__init__()
        FUSE.left = None
        self.directory = tempfile.TemporaryDirectory()
        self.paths = SweepPaths(Path(self.directory.name), "quad")
        self.paths.directory.mkdir()
        self.spec = parse_spec(SPEC, "quad.yaml")
        Ledger.create(self.paths.ledger, mode="min", sweep_id="s")
        self.outage: str | None = None
        self.server = DiskServer(Path(":memory:"), self._fault)
        self.driver: Driver | None = None
        self.ended: dict[int, TrialRecord] = {}
        self.params: dict[int, dict[str, Any]] = {}

    def _fault(self, place: str) -> None:
        if place == self.outage:
            raise ConnectionError(place)

    # What happens

    @rule(dies_at=st.none() | st.integers(0, 40))
    @precondition(lambda self: self.driver is None)
    def resume(self, dies_at: int | None) -> None:
        def begin() -> None:
            self.driver = Driver(self.paths, self.spec, self.server)

        self._until_death(begin, dies_at)

    @rule(dies_at=st.none() | st.integers(0, 20))
    @precondition(lambda self: self.driver is not None and not self.driver.exhausted)
    def suggest(self, dies_at: int | None) -> None:
        self._until_death(self._driver.suggest, dies_at)

    @rule(which=st.integers(0, 1), times=st.integers(1, 4), dies_at=st.none() | st.integers(0, 30))
    @precondition(lambda self: self.driver is not None and self.driver.live)
    def train(self, which: int, times: int, dies_at: int | None) -> None:
        number = self._pick(which)

        def steps() -> None:
            for _ in range(times):
                if number in self._driver.live:
                    self._driver.advance(number)

        self._until_death(steps, dies_at)

    @rule(dies_at=st.none() | st.integers(0, 30))
    @precondition(lambda self: self.driver is not None)
    def write(self, dies_at: int | None) -> None:
        self._until_death(self._driver.write, dies_at)

    @rule(which=st.integers(0, 1), dies_at=st.none() | st.integers(0, 4))
    @precondition(lambda self: self.driver is not None and self.driver.live)
    def checkpoint(self, which: int, dies_at: int | None) -> None:
        _, training = self._driver.live[self._pick(which)]
        self._until_death(training.save, dies_at)

    @rule(which=st.integers(0, 1), untold=st.booleans(), dies_at=st.none() | st.integers(0, 15))
    @precondition(lambda self: self.driver is not None and self.driver.live)
    def kill_trial(self, which: int, untold: bool, dies_at: int | None) -> None:
        number = self._pick(which)
        self._until_death(lambda: self._driver.replace_worker(number, untold=untold), dies_at)

    @rule()
    @precondition(lambda self: self.driver is not None)
    def kill_driver(self) -> None:
        self._remove_stale_writer()

    @rule(dies_at=st.none() | st.integers(0, 10))
    @precondition(lambda self: self.driver is not None)
    def stop(self, dies_at: int | None) -> None:
        self._until_death(self._driver.stop, dies_at)
        if self.driver is not None:
            self.driver = None

    @rule(dies_at=st.none() | st.integers(0, 12))
    @precondition(lambda self: self.driver is not None)
    def deliver(self, dies_at: int | None) -> None:
        self._until_death(self._driver.deliver, dies_at)

    @rule(
        outage=st.sampled_from(
            [None, "before open_experiment", "after create_run", "before log_points",
             "after log_points", "after log_params", "before set_status", "after set_status"]
        )
    )  # fmt: skip
    def change_the_server(self, outage: str | None) -> None:
        self.outage = outage

    @rule(extra=st.integers(1, 2))
    @precondition(lambda self: self.driver is None and self.spec.trials < MOST_TRIALS)
    def extend(self, extra: int) -> None:
        self.spec = self.spec.model_copy(update={"trials": self.spec.trials + extra})

    @rule(which=st.integers(0, MOST_TRIALS), how=st.sampled_from(["flip", "cut", "manifest"]))
    @precondition(lambda self: self.driver is None)
    def corrupt_checkpoint(self, which: int, how: str) -> None:
        directory = self.paths.trial(which)
        saved = CheckpointStore(directory).generations()
        if len(saved) < 2:
            return  # every checkpoint damaged is another story: the trial then fails
        damaged = saved[-1].path / ("manifest.json" if how == "manifest" else STATE)
        content = damaged.read_bytes()
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        damaged.write_bytes(content[:middle] if how == "cut" else flipped)

    @rule()
    @precondition(lambda self: self.driver is None and (self.paths.outbox / "outbox.db").exists())
    def corrupt_outbox(self) -> None:
        for suffix in ("-wal", "-shm"):
            (self.paths.outbox / f"outbox.db{suffix}").unlink(missing_ok=True)
        (self.paths.outbox / "outbox.db").write_bytes(b"no database" * 500)

    # What is true, at any time and in the end

    @invariant()
    def ledger_is_whole(self) -> None:
        """U3: no trial is lost, doubled or changed after its end."""
        trials = self._trials()
        assert [t.number for t in trials] == list(range(len(trials)))
        assert len(trials) <= self.spec.trials
        for trial in trials:
            if trial.finished:
                assert self.ended.setdefault(trial.number, trial) == trial
            if len(trial.params) == len(self.spec.space):
                assert self.params.setdefault(trial.number, trial.params) == trial.params
                for epoch, value in trial.reports.items():
                    assert value == loss_of(trial.params, epoch * STEPS)
        assert self.ended.keys() <= {t.number for t in trials}

    @invariant()
    def checkpoints_are_one_chain(self) -> None:
        """U1: whatever verifies is a state of this very trial."""
        for number, params in self.params.items():
            for generation in CheckpointStore(self.paths.trial(number)).generations():
                content = read_state(LocalFiles(generation.path.parent), generation)
                if content is not None:
                    state = json.loads(content)
                    assert state["chain"] == chain_of(params, generation.step)

    @invariant()
    def points_are_recorded_once(self) -> None:
        """U2: at any moment no point is there twice or wrong."""
        for number, params in self.params.items():
            assert len(self.server.runs(number)) <= 1
            seen = self.server.points(number)
            assert len({(key, step) for key, step, _ in seen}) == len(seen)
            for key, step, value in seen:
                assert value == (step // STEPS if key == "epoch" else loss_of(params, step))

    def teardown(self) -> None:
        """Resume once more, undisturbed, to the end: then everything is there."""
        try:
            self._settle()
        finally:
            self._remove_stale_writer()
            self.server.close()
            self.directory.cleanup()

    def _settle(self) -> None:
        FUSE.left, self.outage = None, None
        self._remove_stale_writer()
        driver = self.driver = Driver(self.paths, self.spec, self.server)
        for _ in range(200):
            driver.suggest()
            for number in sorted(driver.live):
                driver.advance(number)
            if driver.exhausted and not driver.live:
                break
        driver.write()
        driver.deliver()
        assert driver.recorder.pending() == 0
        self.ledger_is_whole()
        self.checkpoints_are_one_chain()
        self.points_are_recorded_once()
        trials = self._trials()
        assert len(trials) == self.spec.trials
        for trial in trials:
            assert trial.finished
            [(status, _, tags)] = self.server.runs(trial.number)
            assert status == run_status(trial)
            assert tags.get("stopped_by", "") == ("asha" if trial.state == "pruned" else "")
            rows = read_rows(self.paths.trial(trial.number))
            assert [row.step for row in rows] == list(range(1, len(rows) + 1))
            assert trial.reports.keys() == set(range(1, len(rows) // STEPS + 1))
            if trial.state == "complete":
                assert len(rows) == EPOCHS * STEPS
            there = sorted((key, step, v) for key, step, v in self.server.points(trial.number))
            assert there == sorted(
                (k, row.step, v) for row in rows for k, v in row.metrics.items()
            )

    # How it is made to happen

    @property
    def _driver(self) -> Driver:
        assert self.driver is not None
        return self.driver

    def _pick(self, which: int) -> int:
        live = sorted(self._driver.live)
        return live[which % len(live)]

    def _until_death(self, what: Callable[[], None], dies_at: int | None) -> None:
        FUSE.left = dies_at
        try:
            what()
        except Died:
            self._remove_stale_writer()
        finally:
            FUSE.left = None

    def _remove_stale_writer(self) -> None:
        if self.driver is not None:
            self.driver.die()
            self.driver = None

    def _trials(self) -> list[TrialRecord]:
        return Ledger.open(self.paths.ledger).trials()


def _run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        SweepMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_sweep_under_faults_keeps_invariants() -> None:
    _run(examples=6, steps=20)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_sweep_under_many_faults_keeps_invariants() -> None:
    _run(examples=300, steps=50)
