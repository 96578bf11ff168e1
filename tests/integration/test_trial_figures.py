"""Figures of trials that have ended: real processes draw them, a recorder in memory gets them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from sweeps.artifacts import trial_figures
from sweeps.artifacts.trial_figures import draw_figures, figure_files, trials_without_figures
from sweeps.paths import TRIAL_CONFIG
from sweeps.run import sync, ui
from sweeps.run.sync import Drawing, draw_missing, record_drawing
from sweeps.spec.spec import trial_yaml
from sweeps.sweep_lock import SweepLock
from tests.curves import append_rows
from tests.integration.commandline import wait_until
from tests.memory_recorder import MemoryRecorder
from tests.slices import sliced
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.config import TrialConfig
from trainable.store.metrics_file import Row

NAMES = [
    "figures/grad_norm.png",
    "figures/learning_rate.png",
    "figures/train_loss.png",
    "figures/val_loss.png",
]


class Queue(MemoryRecorder):
    """Keeps what would be put into the outbox."""

    needs_figures = False

    def figures_sent(self) -> None:
        self.needs_figures = False

    def close(self, timeout: float) -> None:
        del timeout


class Sweep(MadeSweep):
    """Trials that have ended, with rows on disk, and the sync of their figures."""

    def __init__(self, root: Path, queue: Queue) -> None:
        super().__init__(root)
        self.queue = queue

    def add_drawable(self, state: str | None = "complete", value: float = 0.5) -> int:
        number = self.add(state, value)
        metrics = {"train/loss": 1.0, "train/grad_norm": 2.0, "train/lr": 0.1, "val/loss": 1.0}
        append_rows(self.paths.trial(number), (Row(step, 0, metrics) for step in range(1, 5)))
        return number

    def draw(self) -> Drawing:
        (self.paths.directory / ".export-test").mkdir(exist_ok=True)
        return draw_missing(self.view, self.paths.directory / ".export-test")

    def sync(self) -> int:
        return record_drawing(self.paths, self.spec, self.draw())

    def names(self, number: int | None) -> list[str]:
        return sorted(self.queue.runs[number].artifacts)

    def tag(self, number: int) -> str:
        return self.queue.runs[number].tags["figures"]


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweep:
    queue = Queue()
    monkeypatch.setattr(sync, "_queue", lambda *_, **__: queue)
    return Sweep(tmp_path, queue)


def test_each_ended_trial_gets_its_figures_once(sweep: Sweep) -> None:
    numbers = [sweep.add_drawable(state) for state in ("complete", "pruned", "failed")]
    broken, gone, running = (sweep.add_drawable(state) for state in ("complete", "failed", None))
    shutil.rmtree(sweep.paths.trial(gone))
    (sweep.paths.trial(broken) / "metrics.jsonl").write_text("no rows\n")
    assert sweep.sync() == len(numbers)
    for number in numbers:
        assert (sweep.names(number), sweep.tag(number)) == (NAMES, "drawn")
        assert [f"figures/{path.name}" for path in figure_files(sweep.paths, number)] == NAMES
        pictures = sweep.queue.runs[number].artifacts.values()
        assert all(content.startswith(b"\x89PNG") for content in pictures)
    assert sweep.tag(broken).startswith("missing: CurveDamaged")
    assert sweep.tag(gone) == f"missing: there is no {sweep.paths.trial(gone)}"
    assert running not in sweep.queue.runs

    sweep.queue.runs.clear()
    assert sweep.sync() == 0
    assert sweep.queue.runs.keys() <= {None, broken, gone}


def test_unrecorded_figures_are_drawn_again(sweep: Sweep) -> None:
    number = sweep.add_drawable()
    sweep.draw()  # and its process is killed before it records them
    assert sweep.sync() == 1
    assert sweep.names(number) == NAMES


def test_figures_that_another_process_has_recorded_stay(sweep: Sweep) -> None:
    number = sweep.add_drawable()
    slow = sweep.draw()
    (sweep.paths.trial(number) / "figures").mkdir()
    assert record_drawing(sweep.paths, sweep.spec, slow) == 0
    assert number not in sweep.queue.runs


def test_a_trial_is_drawn_with_the_config_it_trained_with(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    number = sweep.add_drawable()
    record = sweep.ledger.trial(number)
    config = sweep.paths.trial(number) / TRIAL_CONFIG
    config.write_text(trial_yaml(sweep.spec.trial_config(number, record.best_params)))
    changed = with_overrides(sweep.spec, ["train.schedule.name=linear", "budget.epochs=20"])
    asked: list[TrialConfig] = []

    def draw(requests: list[dict[str, Any]]) -> list[None]:
        asked.extend(TrialConfig.model_validate(one["config"]) for one in requests)
        return [None for _ in requests]

    monkeypatch.setattr(trial_figures, "_draw", draw)
    draw_figures(changed, sweep.paths, [record], tmp_path)
    (used,) = asked
    assert (used.train.schedule.name, used.budget.epochs) == ("cosine", sweep.spec.budget.epochs)
    assert used.train.optimizer.lr == record.best_params["train.optimizer.lr"]


@pytest.mark.chaos
def test_a_process_that_cannot_draw_says_why(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "trainable.py").write_text("raise SystemExit('no Matplotlib here')")
    numbers = [sweep.add_drawable(), sweep.add_drawable()]
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        patch.chdir(tmp_path)
        assert sweep.sync() == 0
    for number in numbers:
        assert sweep.tag(number) == "missing: the process that draws ended with no Matplotlib here"
    assert sweep.sync() == len(numbers)


@contextmanager
def _beside(action: Callable[[], None]) -> Iterator[None]:
    """Do this in a thread meanwhile."""
    with ThreadPoolExecutor() as executor:
        done = executor.submit(action)
        yield
        done.result()


def _drawing() -> list[psutil.Process]:
    """The processes that draw, which have their command line a moment after their beginning."""
    below = psutil.Process().children()
    return [one for one in below if "trainable.figures" in one.cmdline()]


@pytest.mark.chaos
@pytest.mark.parametrize("cpus", [1, 2])
def test_killed_process_leaves_its_share_to_the_next_sync(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, cpus: int
) -> None:
    monkeypatch.setattr(trial_figures, "usable_cpus", lambda: cpus)
    numbers = [sweep.add_drawable() for _ in range(12)]

    def kill() -> None:
        wait_until(lambda: len(_drawing()) == cpus)
        _drawing()[0].kill()

    with _beside(kill):
        num_drawn = sweep.sync()
    missing = [number for number in numbers if sweep.tag(number) != "drawn"]
    assert 0 < len(missing) <= len(numbers) // cpus
    assert len(missing) == len(numbers) - num_drawn
    reason = "missing: the process that draws ended with exit code -9"
    assert {sweep.tag(number) for number in missing} == {reason}
    assert sweep.sync() == len(missing)
    assert trials_without_figures(sweep.paths, sweep.view.records) == []


@pytest.mark.chaos
@pytest.mark.parametrize("concluded", [True, False])
def test_sweeps_own_run_gets_report_and_best_figures_at_its_end(
    sweep: Sweep, concluded: bool
) -> None:
    best = sweep.add_drawable("complete", 0.1)
    sweep.add_drawable("complete", 0.2)
    if concluded:
        sweep.ledger.mark_published()
    assert sweep.sync() == 2
    own = [*NAMES, "report.html"] if concluded else []
    assert (sweep.names(None) if own else []) == own
    if concluded:
        own_files, files = sweep.queue.runs[None].artifacts, sweep.queue.runs[best].artifacts
        assert {name: own_files[name] for name in NAMES} == files
        assert b"<html" in sweep.paths.report.read_bytes()

    sweep.queue.runs.clear()
    assert sweep.sync() == 0
    assert not sweep.queue.runs.get(None) or sweep.names(None) == []
    sweep.queue.needs_figures = True  # the tracking store is another one
    assert sweep.sync() == 0
    assert sweep.names(best) == NAMES
    assert (sweep.names(None) if own else []) == own


class Served:
    """A server whose page somebody looks at until `until` holds."""

    url = "http://127.0.0.1:5000"

    def __init__(self, until: Callable[[], bool] = lambda: True) -> None:
        self._until = until
        self.stopped = False

    def wait(self) -> None:
        wait_until(self._until)
        raise KeyboardInterrupt

    def stop(self) -> None:
        self.stopped = True

    def link(self, page: str) -> str:
        return page


@pytest.mark.parametrize("who", sliced(["nobody", "driver", "no sweep"], "nobody".__eq__))
def test_missing_figures_are_drawn_while_the_page_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    sweep = Sweep(tmp_path, Queue())
    numbers = [sweep.add_drawable(state) for state in ("complete", "complete", "failed", None)]
    figures = [sweep.paths.trial(number) / "figures" for number in numbers]
    figures[0].mkdir()
    server = Served(lambda: who != "nobody" or (figures[1].is_dir() and figures[2].is_dir()))
    monkeypatch.setattr(ui, "start_server", lambda *_, **__: server)
    text = io.StringIO()
    lock = SweepLock(sweep.paths.lock)
    if who == "driver":
        lock.acquire()
    view = None if who == "no sweep" else sweep.view
    ui.serve(
        Console(file=text, width=200).print,
        tmp_path,
        view,
        port=0,
        open_browser=False,
    )
    lock.release()
    assert server.stopped
    said = "drawing the figures of 2 trials for MLflow; reload its page to see them\n"
    assert text.getvalue().endswith(said) == (who == "nobody")
    assert ("figures" in text.getvalue()) == (who == "nobody")
    assert figures[1].is_dir() == figures[2].is_dir() == (who == "nobody")
    assert not figures[3].exists()
