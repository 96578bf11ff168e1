"""Pictures of trials that have ended: real processes draw them, a recorder in memory gets them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from optuna.samplers import RandomSampler

from sweeps.commands.sync import draw_what_is_missing
from sweeps.config.spec import parse_spec, trial_yaml
from sweeps.errors import LedgerError
from sweeps.ledger.ledger import Ledger
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.publishing.figure_worker import FigureWorkerPool, _Artist
from sweeps.recording.locked_recorder import LockedRecorder
from sweeps.sweep_lock import SweepLock
from tests.curves import append_rows
from tests.make_trials import ask
from tests.specs import with_overrides
from tracking.recorder import MemoryRecorder
from trainable.config import TrialConfig
from trainable.metrics_file import Row

SPEC = """
name: small
task: digits
metric: val/loss
mode: min
trials: 3
space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}
"""
NAMES = [
    "figures/grad_norm.png",
    "figures/learning_rate.png",
    "figures/train_loss.png",
    "figures/val_loss.png",
]


class Sweep:
    """Trials that have ended, with rows on disk."""

    def __init__(self, root: Path) -> None:
        self.paths = SweepPaths(root, "small")
        self.paths.directory.mkdir()
        self.spec = parse_spec(SPEC, "small.yaml")
        self.ledger = Ledger.create(self.paths.ledger, mode="min", sweep_id="s")
        self.recorder = MemoryRecorder()

    def add(self, *, rows: int = 4, ended: bool = True) -> int:
        space = {key: value.to_optuna() for key, value in self.spec.space.items()}
        number = ask(self.ledger, space, RandomSampler(seed=0)).number
        metrics = {"train/loss": 1.0, "train/grad_norm": 2.0, "train/lr": 0.1, "val/loss": 1.0}
        append_rows(
            self.paths.trial(number),
            (Row(step, 0, metrics) for step in range(1, rows + 1)),
        )
        if ended:
            self.ledger.report(number, epoch=1, step=1, value=1.0)
            self.ledger.finish(number, "complete")
        return number

    def open(self) -> FigureWorkerPool:
        return FigureWorkerPool(self.spec, self.paths, self.ledger.trials(), self.recorder)

    def names(self, number: int) -> list[str]:
        return sorted(self.recorder.runs[number].artifacts)

    def tag(self, number: int) -> str:
        return self.recorder.runs[number].tags["figures"]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def test_each_trial_that_has_ended_gets_its_pictures_once(sweep: Sweep) -> None:
    before, broken, running = sweep.add(), sweep.add(), sweep.add(ended=False)
    (sweep.paths.trial(broken) / "metrics.jsonl").write_text("no rows\n")
    started = time.monotonic()
    with sweep.open() as gallery:
        assert gallery.finish(timeout=0) == 2
    assert time.monotonic() - started < 5
    command = f"sweep sync small --root {sweep.paths.root}"
    told = f"missing: the sweep did not wait for them; {command} draws them"
    assert sweep.tag(before) == sweep.tag(broken) == told
    assert gallery.pictures(before) == []
    assert not list(sweep.paths.directory.rglob(".figures"))

    sweep.recorder.runs.clear()
    sweep.ledger.finish(running, "pruned")
    with sweep.open() as gallery:
        dropped = gallery.finish(timeout=0, ranked=[running])  # which is waited for
        assert dropped == sum(sweep.tag(number) == told for number in sweep.recorder.runs)
        assert len(gallery.pictures(running)) == 4
    with sweep.open() as gallery:
        gallery.finish()
    for number in (before, running):
        assert sweep.names(number) == NAMES
        assert sweep.tag(number) == "drawn"
        assert [f"figures/{path.name}" for path in gallery.pictures(number)] == NAMES
        pictures = sweep.recorder.runs[number].artifacts
        assert all(content.startswith(b"\x89PNG") for content in pictures.values())
    assert sweep.tag(broken).startswith("missing: CurveDamaged")

    sweep.recorder.runs.clear()
    (sweep.paths.trial(broken) / "figures").mkdir()
    with sweep.open() as gallery:
        gallery.finish(timeout=60)
    assert not sweep.recorder.runs


def test_whose_lock_was_taken_away_tells_nothing_of_pictures(sweep: Sweep) -> None:
    sweep.add()
    lock = SweepLock(sweep.paths.lock)
    lock.acquire()
    recorder = LockedRecorder(sweep.recorder, lock.check)
    sweep.paths.lock.unlink()
    with FigureWorkerPool(sweep.spec, sweep.paths, sweep.ledger.trials(), recorder) as gallery:
        gallery.finish()
    assert sweep.recorder.runs.keys() == {None}
    assert gallery.pictures(0) == []
    lock.release_local()


def test_a_ledger_that_is_away_is_not_waited_for_by_each_trial(sweep: Sweep) -> None:
    asked: list[None] = []

    def away() -> None:
        asked.append(None)
        raise LedgerError("it does not answer")

    for _ in range(8):
        sweep.add()
    recorder = LockedRecorder(sweep.recorder, away)
    with FigureWorkerPool(sweep.spec, sweep.paths, sweep.ledger.trials(), recorder):
        pass
    assert 1 <= len(asked) < 4


def test_a_trial_is_drawn_as_it_was_trained(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    number = sweep.add()
    record = sweep.ledger.trial(number)
    config = sweep.paths.trial(number) / TRIAL_CONFIG
    config.write_text(trial_yaml(sweep.spec.trial_config(number, record.best_params)))
    sweep.spec = with_overrides(sweep.spec, ["train.schedule.name=linear", "budget.epochs=20"])
    asked: list[TrialConfig] = []

    def draw(_: object, config: dict[str, object], *__: object) -> list[Path]:
        asked.append(TrialConfig.model_validate(config))
        return []

    monkeypatch.setattr("sweeps.publishing.figure_worker._Artist.draw", draw)
    with sweep.open() as gallery:
        gallery.finish(timeout=60)
    (used,) = asked
    assert (used.train.schedule.name, used.budget.epochs) == ("cosine", 10)
    assert used.train.optimizer.lr == record.best_params["train.optimizer.lr"]


def test_at_the_end_the_better_ones_are_drawn_first(sweep: Sweep) -> None:
    first, worst, middle, best = (sweep.add() for _ in range(4))
    with sweep.open() as gallery:
        assert gallery.finish(timeout=60, ranked=[best, middle]) == 0
    begun = {None, first}  # before the end is known
    assert [one for one in sweep.recorder.runs if one not in begun] == [best, middle, worst]


@pytest.mark.parametrize("cpus", [1, 2])
def test_at_the_end_every_cpu_draws(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr("sweeps.publishing.figure_worker.usable_cpus", lambda: cpus)
    draw, drew = _Artist.draw, set()

    def noted(artist: _Artist, *what: Any) -> list[Path]:
        drawn = draw(artist, *what)
        drew.add(artist)
        return drawn

    monkeypatch.setattr(_Artist, "draw", noted)
    numbers = [sweep.add() for _ in range(20)]
    with sweep.open() as gallery:
        assert gallery.finish(timeout=120, ranked=numbers) == 0
    assert len(drew) == cpus
    for number in numbers:
        assert sweep.tag(number) == "drawn"
        assert sweep.names(number) == NAMES


def test_a_process_that_cannot_draw_tells_why(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trainable.py").write_text("raise SystemExit('no Matplotlib here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    numbers = [sweep.add(), sweep.add()]
    with sweep.open() as gallery:
        gallery.finish(timeout=60)
    for number in numbers:
        assert sweep.tag(number) == "missing: the process that draws ended with no Matplotlib here"


class _Killing(MemoryRecorder):
    """Kills the process that draws at its first picture."""

    def __init__(self) -> None:
        super().__init__()
        self.killed: list[psutil.Process] = []

    def artifact(self, trial: int | None, path: Path, name: str) -> None:
        super().artifact(trial, path, name)
        if not self.killed:
            children = psutil.Process().children()
            self.killed = [one for one in children if "trainable.figures" in one.cmdline()]
            self.killed[0].kill()


def test_a_process_that_dies_costs_one_trial_its_pictures(sweep: Sweep) -> None:
    first, second, third = [sweep.add() for _ in range(3)]
    sweep.recorder = _Killing()
    with sweep.open() as gallery:
        gallery.finish(timeout=60)
    assert sweep.tag(second) == "missing: the process that draws ended with exit code -9"
    assert [sweep.tag(first), sweep.tag(third)] == ["drawn", "drawn"]


class _Queue(MemoryRecorder):
    def close(self, timeout: float) -> None:
        del timeout


@pytest.mark.parametrize("concluded", [True, False])
def test_late_pictures_of_the_best_trial_are_the_sweeps_own_too(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, concluded: bool
) -> None:
    best, other = sweep.add(), sweep.add()
    if concluded:
        sweep.ledger.mark_published()
    queue = _Queue()
    monkeypatch.setattr("sweeps.commands.sync._queue", lambda *_: queue)
    assert draw_what_is_missing(sweep.paths, sweep.spec) == 2
    for number in (best, other):
        assert sorted(queue.runs[number].artifacts) == NAMES
    own = queue.runs[None].artifacts
    assert own == (queue.runs[best].artifacts if concluded else {})
    queue.runs[None].artifacts.clear()
    assert draw_what_is_missing(sweep.paths, sweep.spec) == 0
    assert not own
