"""A population on the real ledger and real checkpoints: after a kill at any write it ends like an
uninterrupted one, bit for bit.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.tune.search import Searcher

from sweeps.ledger.ledger import Ledger
from sweeps.ledger.trials import TrialRecord
from sweeps.paths import SweepPaths
from sweeps.search import pbt_exploit
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.chaos.killed_runs import differences, without_measured
from tests.slices import sliced
from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.config import TrialConfig
from trainable.processes.local_ranks import local_ranks
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import read_rows
from trainable.warm_start import inherited

SPEC = """
name: s
task: {name: digits, model: mlp, width: 8}
metric: val/loss
mode: min
trials: 4
budget: {epochs: 3}
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
  train.optimizer.weight_decay: {uniform: [0.0, 0.1]}
search: {sampler: random}
early_stopping: {scheduler: pbt, quantile: 0.5}
train: {batch_size: 512}
"""
MEMBERS, STEPS = 4, 3


class Died(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class Driver:
    """What Tune does with one worker: one stretch of a trial after the other."""

    def __init__(self, paths: SweepPaths, spec: SweepSpec) -> None:
        self.paths, self.spec = paths, spec
        self.warned: list[tuple[int, str]] = []
        paths.directory.mkdir(parents=True, exist_ok=True)
        new = not paths.ledger.exists()
        self.ledger = (
            Ledger.create(paths.ledger, mode="min", sweep_id="s")
            if new
            else Ledger.open(paths.ledger)
        )
        self.searcher = LedgerSearcher(
            self.ledger,
            spec,
            paths,
            DriverCallbacks(
                fence=lambda: None,
                refuse=lambda *_: None,
                warn=lambda number, sentence: self.warned.append((number, sentence)),
            ),
            Capacity(1, 1),
        )

    def run(self) -> Driver:
        for turn in itertools.count():
            config: Any = self.searcher.suggest(f"t{turn}")
            if config == Searcher.FINISHED:
                return self
            number, pause = config["number"], config["pause_at_epoch"]
            made = TrialConfig.model_validate(config["config"])
            directory = Path(config["directory"])
            with (
                local_ranks(made, directory, device="cpu", threads=1) as ranks,
                open_trainer(made, directory, device="cpu", until=pause, ranks=ranks) as one,
            ):
                for report in one.events():
                    told = report.metrics["val/loss"]
                    self.ledger.report(number, epoch=report.epoch, step=report.step, value=told)
            if pause is None:
                self.ledger.finish(number, "complete")
            self.searcher.on_trial_complete(f"t{turn}")
        raise AssertionError

    def told(self) -> list[tuple[Any, ...]]:
        return [
            (t.state, t.suggested, t.lineage, t.reports, t.value, t.best_epoch)
            for t in self.ledger.trials()
        ]

    def newest(self, number: int) -> dict[str, Any]:
        store = CheckpointStore(self.paths.trial(number))
        return without_measured(store.load(store.generations()[-1]))


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """A population that nobody interrupted."""
    paths = SweepPaths(tmp_path_factory.mktemp("once"), "s")
    return Driver(paths, parse_spec(SPEC, "s.yaml")).run()


def test_worst_members_continue_from_best_with_new_rates(once: Driver) -> None:
    trials = once.ledger.trials()
    assert [trial.state for trial in trials] == ["complete"] * MEMBERS
    exploits = [(trial, mutation) for trial in trials for mutation in trial.lineage]
    assert [mutation.epoch for _, mutation in exploits].count(1) == 2
    assert [mutation.epoch for _, mutation in exploits].count(2) == 2
    for heir, mutation in exploits:
        donor = trials[mutation.donor]
        epoch = mutation.epoch
        assert donor.reports[epoch] < heir.reports[epoch]
        assert not any(one.epoch == epoch for one in donor.lineage)
        before, after = donor.params_at(epoch), mutation.params
        assert before.keys() == after.keys()
        assert all(before[key] != after[key] for key in before)
        # From there on it is the donor's model, and no longer its own.
        assert abs(heir.reports[epoch + 1] - donor.reports[epoch]) < heir.reports[epoch] / 3
        found = inherited(once.paths.trial(heir.number))
        assert found is not None
        assert found.epoch == heir.lineage[-1].epoch
    for trial in trials:
        rows = read_rows(once.paths.trial(trial.number))
        assert [row.step for row in rows] == list(range(1, 3 * STEPS + 1))


def test_trial_is_shown_with_values_at_its_best(once: Driver) -> None:
    for trial in once.ledger.trials():
        assert trial.best_params == trial.params_at(trial.best_epoch or 0)
        epochs = [one.epoch for one in trial.lineage]
        expected = [trial.suggested, *(one.params for one in trial.lineage)]
        for epoch in (1, 2, 3):
            assert trial.params_at(epoch) == expected[sum(one < epoch for one in epochs)]


_POINTS: list[tuple[Any, str]] = [
    (Ledger, "mutate"),
    (pbt_exploit, "link_checkpoint_from_donor"),
    (LocalFiles, "link"),
    (LocalFiles, "rename"),
]
"""What is written between two rungs; a rename is also each save's."""


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], list[str]]]:
    """Let the process die around its write of that number: before it if even, else after it."""

    def arm(at: int) -> list[str]:
        seen: list[str] = []

        def wrap(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            def write(*args: Any, **kwargs: Any) -> Any:
                if name == "rename" and not Path(args[0].address("")).match("*/inherited"):
                    return real(*args, **kwargs)
                for moment in ("before", "after"):
                    seen.append(f"{moment} {name}")
                    if len(seen) == at + 1:
                        raise Died
                    if moment == "before":
                        done = real(*args, **kwargs)
                return done

            monkeypatch.setattr(owner, name, write)

        for owner, name in _POINTS:
            wrap(owner, name)
        return seen

    yield arm
    monkeypatch.undo()


def _assert_same_after_death(
    once: Driver, root: Path, dying: Callable[[int], list[str]], monkeypatch: Any, at: int
) -> bool:
    """Kill a driver there and let another one go on; False where there is no such write."""
    paths = SweepPaths(root / str(at), "s")
    seen = dying(at)
    try:
        Driver(paths, once.spec).run()
    except Died:
        pass
    else:
        monkeypatch.undo()
        return False
    monkeypatch.undo()
    killed = Driver(paths, once.spec).run()
    assert killed.told() == once.told(), f"died {seen[-1]} ({at})"
    for number in range(MEMBERS):
        assert differences(killed.newest(number), once.newest(number)) == [], (seen[-1], number)
        curves = [_curve(driver.paths.trial(number)) for driver in (killed, once)]
        assert curves[0] == curves[1]
    return True


def _curve(directory: Path) -> list[tuple[int, float | None]]:
    return [(row.step, row.metrics.get("train/loss")) for row in read_rows(directory)]


@pytest.mark.parametrize("at", sliced([1, 6], (1).__eq__))
def test_kill_at_a_rung_changes_nothing(
    once: Driver, tmp_path: Path, dying: Any, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    # After the ledger knows, and with one checkpoint linked of two.
    assert _assert_same_after_death(once, tmp_path, dying, monkeypatch, at)


@pytest.mark.chaos
def test_kill_at_any_write_of_a_rung_changes_nothing(
    once: Driver, tmp_path: Path, dying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = itertools.takewhile(
        lambda at: _assert_same_after_death(once, tmp_path, dying, monkeypatch, at),
        itertools.count(),
    )
    assert sum(1 for _ in points) >= 2 * (2 + 3 * 4), "two decisions and four links"


@pytest.mark.chaos
def test_decisions_hold_after_rungs_are_edited(
    once: Driver, tmp_path: Path, dying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = SweepPaths(tmp_path, "s")
    dying(1)
    with pytest.raises(Died):
        Driver(paths, once.spec).run()
    monkeypatch.undo()
    edited = SPEC.replace("quantile: 0.5", "quantile: 0.5, interval_epochs: 2")
    driver = Driver(paths, parse_spec(edited, "s.yaml"))
    members = [trial.number for trial in driver.ledger.trials() if trial.lineage]
    assert len(members) == 2
    for number in range(MEMBERS):
        found = inherited(paths.trial(number))
        assert (found and found.epoch) == (1 if number in members else None)


@pytest.mark.chaos
def test_member_whose_donor_lost_its_checkpoint_keeps_its_own(
    once: Driver, tmp_path: Path, dying: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = SweepPaths(tmp_path, "s")
    seen = dying(1)
    with pytest.raises(Died):
        Driver(paths, once.spec).run()
    assert seen[-1] == "after mutate"
    monkeypatch.undo()
    trials = Ledger.open(paths.ledger).trials()
    decided = {t.number: t.lineage[-1] for t in trials if t.lineage}
    donor = next(iter(decided.values())).donor
    shutil.rmtree(CheckpointStore(paths.trial(donor)).generations()[-1].path)
    bereft = [number for number, mutation in decided.items() if mutation.donor == donor]
    driver = Driver(paths, once.spec).run()
    for number in decided:
        record = driver.ledger.trial(number)
        assert any(one.epoch == 1 for one in record.lineage) == (number not in bereft)
        if number in bereft:
            assert record.params_at(1) == record.params_at(2) == record.suggested
    assert driver.warned == [
        (
            number,
            f"goes on as it was: trial {donor}, from which it was to go on, has lost its "
            "checkpoint of epoch 1",
        )
        for number in sorted(bereft)
    ]


@pytest.mark.chaos
def test_stopped_or_failed_member_is_no_donor(once: Driver, tmp_path: Path) -> None:
    class Breaking(Driver):
        """Its members 0 and 3 end for good at the first rung, where they wait."""

        def run(self) -> Driver:
            suggest = self.searcher.suggest

            def checked(trial_id: str) -> Any:
                trials = self.ledger.trials()
                if len(trials) == MEMBERS and all(1 in t.reports for t in trials):
                    for number in (0, 3):
                        self.ledger.finish(number, "pruned", reason="stopped by the user")
                return suggest(trial_id)

            self.searcher.suggest = checked  # type: ignore[method-assign]
            return super().run()

    driver = Breaking(SweepPaths(tmp_path, "s"), once.spec).run()
    trials: list[TrialRecord] = driver.ledger.trials()
    assert [trial.state for trial in trials] == ["pruned", "complete", "complete", "pruned"]
    assert not trials[0].lineage
    assert not trials[3].lineage
    assert all(max(trials[number].reports) == 3 for number in (1, 2))


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("task", "own"),
    [
        pytest.param("{name: digits, model: mlp, width: 8}", "random", id="task"),
        pytest.param("tests.loop_cases:plain", "own", id="loop"),
    ],
)
def test_member_of_two_ranks_copies_another(tmp_path: Path, task: str, own: str) -> None:
    text = SPEC.replace("{name: digits, model: mlp, width: 8}", task).replace(
        "epochs: 3", "epochs: 2"
    )
    text = text.replace("trials: 4", "trials: 2\nresources: {workers: 2, cpu: 1, gpu: 0}")
    driver = Driver(SweepPaths(tmp_path, "s"), parse_spec(text, "s.yaml")).run()
    trials = driver.ledger.trials()
    assert [trial.state for trial in trials] == ["complete"] * 2
    assert driver.warned == []
    (heir,) = (trial for trial in trials if trial.lineage)
    members = [driver.newest(number) for number in (heir.lineage[0].donor, heir.number)]
    (theirs,), (ours,) = (state["ranks"] for state in members)
    # what a loop keeps for its second rank is the donor's; a task's random numbers stay the run's
    assert (differences(theirs[own], ours[own]) == []) == ("loop" in members[0])
