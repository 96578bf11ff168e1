"""A run that starts from the weights of another: what it takes and keeps, and interruptions."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.chaos.killed_runs import curve, differences, without_measured
from tests.unit.trainable.test_streams import Sampled
from trainable.checkpoint import CheckpointStore, Generation
from trainable.config import CheckpointConfig, TrialConfig
from trainable.errors import ForeignCheckpoint
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import read_rows
from trainable.warm_start import (
    copy_generations,
    inherited,
    link_checkpoint_from_donor,
    with_inheritance,
)

Train = Callable[..., dict[str, Any]]
DONOR, HEIR = {"lr": 0.05, "weight_decay": 0.3}, {"lr": 0.001, "weight_decay": 0.0}


@pytest.fixture
def train(opened: Any, configure: Callable[..., TrialConfig], toy: Any) -> Train:
    """Train a run up to an epoch, and return its newest state."""

    def run(directory: Path, pause: int, *, seed: int, **optimizer: float) -> dict[str, Any]:
        config = configure(epochs=4, seed=seed, optimizer={"name": "adamw", **optimizer})
        trainer = opened(config, directory, toy(), until=pause)
        list(trainer.events())
        trainer.close()
        return newest(directory)

    return run


def newest(directory: Path) -> dict[str, Any]:
    store = CheckpointStore(directory)
    return store.load(store.generations()[-1])


def saved(directory: Path) -> Generation:
    return CheckpointStore(directory).generations()[-1]


@pytest.fixture
def heir(tmp_path: Path, train: Train) -> Path:
    """The directory of a run that inherits from `donor` beside it, both after two epochs."""
    train(tmp_path / "donor", 2, seed=1, **DONOR)
    train(tmp_path / "heir", 2, seed=2, **HEIR)
    link_checkpoint_from_donor(saved(tmp_path / "donor"), tmp_path / "heir")
    return tmp_path / "heir"


def test_checkpoint_is_linked_and_not_copied(heir: Path) -> None:
    ours, theirs = inherited(heir), saved(heir.parent / "donor")
    assert ours is not None
    for file in theirs.path.iterdir():
        assert (ours.path / file.name).samefile(file)


def test_run_takes_weights_and_keeps_its_position(
    heir: Path, opened: Any, configure: Any, toy: Any
) -> None:
    donor, own = newest(heir.parent / "donor"), newest(heir)
    config = configure(epochs=4, seed=2, optimizer={"name": "adamw", **HEIR})
    trainer = opened(config, heir, toy(), until=3)
    state = trainer.state.state_dict()
    assert differences(state["model"], donor["model"]) == []
    assert differences(state["optimizer"]["state"], donor["optimizer"]["state"]) == []
    assert differences(state["model"], own["model"]) != []
    assert state["progress"] == own["progress"]
    assert differences(state["random"], own["random"]) == []
    assert {g["weight_decay"] for g in donor["optimizer"]["param_groups"]} == {0.3, 0.0}
    assert {g["weight_decay"] for g in trainer.groups} == {0.0}
    assert {g["initial_lr"] for g in trainer.groups} == {0.001}
    assert all(0 < g["lr"] <= 0.001 for g in trainer.groups), "the schedule's, of its own"


def test_interruption_changes_nothing(heir: Path, train: Train, tmp_path: Path) -> None:
    again = tmp_path / "again"
    shutil.copytree(heir, again)
    once = train(heir, 4, seed=2, **HEIR)
    for until in (3, 4):  # the second time it has a state of its own beyond what it inherited
        twice = train(again, until, seed=2, **HEIR)
    assert differences(once["model"], twice["model"]) == []
    assert differences(once["optimizer"], twice["optimizer"]) == []
    for directory in (heir, again):
        assert [row.step for row in read_rows(directory)] == list(range(1, 17))


def test_warm_start_in_the_middle_of_an_epoch(
    tmp_path: Path, opened: Any, configure: Any, toy: Any
) -> None:
    def run(directory: Path, pause: int, *, seed: int, **optimizer: float) -> dict[str, Any]:
        budget = {"steps": 14, "report_every": 3}
        config = configure(budget=budget, seed=seed, optimizer={"name": "adamw", **optimizer})
        config = config.model_copy(update={"checkpoint": CheckpointConfig(every="1 report")})
        with opened(config, directory, toy(), until=pause) as trainer:
            list(trainer.events())
        return newest(directory)

    donor, own = (
        run(tmp_path / "donor", 2, seed=1, **DONOR),
        run(tmp_path / "a", 2, seed=2, **HEIR),
    )
    link_checkpoint_from_donor(saved(tmp_path / "donor"), tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    once = run(tmp_path / "a", 5, seed=2, **HEIR)
    for until in (3, 4, 5):
        twice = run(tmp_path / "b", until, seed=2, **HEIR)
    assert (own["progress"]["epoch"], own["progress"]["window"]) == (1, 2)
    assert differences(donor["model"], own["model"]) != []
    assert differences(without_measured(once), without_measured(twice)) == []
    assert once["progress"]["step"] == 14


@pytest.mark.parametrize("kind", ["stream", "weighted"])
def test_warm_start_keeps_its_place_in_the_data(
    tmp_path: Path, opened: Any, configure: Any, kind: str
) -> None:
    """The other run, with larger batches, is in another epoch."""

    def run(directory: Path, pause: int, *, seed: int, batch_size: int) -> dict[str, Any]:
        budget = {"steps": 12, "report_every": 3}
        config = configure(budget=budget, seed=seed, batch_size=batch_size, every="1 report")
        with opened(config, directory, Sampled(kind), until=pause) as trainer:
            list(trainer.events())
        return newest(directory)

    donor = run(tmp_path / "donor", 1, seed=1, batch_size=24)
    own = run(tmp_path / "heir", 1, seed=2, batch_size=12)
    assert own["progress"]["epoch"] < donor["progress"]["epoch"]
    link_checkpoint_from_donor(saved(tmp_path / "donor"), tmp_path / "heir")
    after = run(tmp_path / "heir", 3, seed=2, batch_size=12)
    alone = run(tmp_path / "alone", 3, seed=2, batch_size=12)
    assert differences(after["position"], alone["position"]) == []
    assert differences(after["model"], alone["model"]) != []


def test_best_value_stays_its_own(heir: Path, train: Train) -> None:
    donor, own = newest(heir.parent / "donor")["progress"], newest(heir)["progress"]
    assert donor["best"] < own["best"], "the case shows nothing"
    after = train(heir, 3, seed=2, **HEIR)["progress"]
    values = [row.metrics["val/loss"] for row in read_rows(heir) if "val/loss" in row.metrics]
    assert after["best"] == min(values)


def test_later_warm_start_replaces_the_first(heir: Path, train: Train) -> None:
    train(heir, 3, seed=2, **HEIR)
    train(heir.parent / "other", 3, seed=3, **DONOR)
    link_checkpoint_from_donor(saved(heir.parent / "other"), heir)
    found = inherited(heir)
    assert found is not None
    assert found.sha256 == saved(heir.parent / "other").sha256
    assert len(list((heir / "inherited").iterdir())) == 1


def test_damaged_warm_start_is_reported_and_not_used(
    heir: Path, opened: Any, configure: Any, toy: Any
) -> None:
    own = newest(heir)
    found = inherited(heir)
    assert found is not None
    content = bytearray((found.path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (found.path / "state.pt").unlink()  # the other run's file stays as it is
    (found.path / "state.pt").write_bytes(content)
    config = configure(epochs=4, seed=2, optimizer={"name": "adamw", **HEIR})
    trainer = opened(config, heir, toy(), until=3)
    assert differences(trainer.state.state_dict()["model"], own["model"]) == []
    (told,) = trainer.store.set_aside
    assert told.startswith("the inherited checkpoint is not used: the checkpoint cannot be used")


def test_damaged_newer_checkpoints_fall_back_to_the_warm_start(
    tmp_path: Path, train: Train, opened: Any, configure: Any, toy: Any
) -> None:
    donor = train(tmp_path / "donor", 2, seed=1, **DONOR)
    best = train(tmp_path / "heir", 1, seed=2, **HEIR)["progress"]["best"]
    train(tmp_path / "heir", 2, seed=2, **HEIR)
    link_checkpoint_from_donor(saved(tmp_path / "donor"), tmp_path / "heir")
    state = saved(tmp_path / "heir").path / "state.pt"
    state.write_bytes(state.read_bytes()[:-1])
    config = configure(epochs=4, seed=2, optimizer={"name": "adamw", **HEIR})
    trainer = opened(config, tmp_path / "heir", toy(), until=3)
    progress = trainer.state.progress
    assert (progress.epoch, progress.step) == (2, donor["progress"]["step"])
    assert progress.best == best


@pytest.mark.parametrize("refusal", [errno.EPERM, errno.EXDEV])
def test_storage_without_links_gets_a_copy(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, refusal: int
) -> None:
    train(tmp_path / "donor", 1, seed=1, **DONOR)

    def link(*_: object) -> None:
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "link", link)
    link_checkpoint_from_donor(saved(tmp_path / "donor"), tmp_path / "heir")
    found = inherited(tmp_path / "heir")
    assert found is not None
    state = CheckpointStore(tmp_path / "heir").load(found)
    assert torch.equal(
        next(iter(state["model"].values())),
        next(iter(newest(tmp_path / "donor")["model"].values())),
    )


def test_run_with_copied_generations_continues_the_other(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "whole", 4, seed=1, **DONOR)
    train(tmp_path / "first", 2, seed=1, **DONOR)
    (tmp_path / "second").mkdir()
    shutil.copy(tmp_path / "first/metrics.jsonl", tmp_path / "second")
    copy_generations(LocalFiles.of(tmp_path / "first"), LocalFiles.of(tmp_path / "second"))
    before = saved(tmp_path / "first")
    assert (saved(tmp_path / "second").path / "state.pt").samefile(before.path / "state.pt")
    found = train(tmp_path / "second", 4, seed=1, **DONOR)
    assert differences(without_measured(found), without_measured(newest(tmp_path / "whole"))) == []
    assert curve(tmp_path / "second") == curve(tmp_path / "whole")
    assert saved(tmp_path / "first") == before


def _inherit(tmp_path: Path, donor: dict[str, Any], heir: dict[str, Any]) -> dict[str, Any]:
    """Save both states, after 3 and 2 reports; return the one from which the heir resumes.

    So it has the donor's counters, as if it had lost newer checkpoints of its own.
    """
    for name, state, reports in (("donor", donor, 3), ("heir", heir, 2)):
        progress = {"reports": reports, "since_report": 0}
        store = CheckpointStore(tmp_path / name, CheckpointConfig())
        store.save(
            lambda state=state, progress=progress: {**state, "progress": progress},
            step=reports,
            reports=reports,
            final=True,
        )
    link_checkpoint_from_donor(saved(tmp_path / "donor"), tmp_path / "heir")
    merged = with_inheritance(tmp_path / "heir", newest(tmp_path / "heir"), [])
    assert merged is not None
    return merged


def _task_state(name: str, ranks: int) -> dict[str, Any]:
    """Return the entries that differ on the ranks; a value says whose it is."""

    def part(rank: int) -> dict[str, str]:
        keys = ("random", "position", "objects", "task")
        return {key: f"{name}'s {key} {rank}" for key in keys}

    others = [{**part(rank), "sums": f"{name}'s sums {rank}"} for rank in range(1, ranks)]
    return part(0) | ({"ranks": others} if others else {})


@pytest.mark.parametrize(("donor", "heir"), [(2, 2), (1, 3), (2, 3), (3, 2), (3, 1)])
def test_further_ranks_of_a_task_take_what_theirs_learned(
    tmp_path: Path, donor: int, heir: int
) -> None:
    """One that the donor did not have takes from the first one, as a new rank does."""
    merged = _inherit(tmp_path, _task_state("donor", donor), _task_state("heir", heir))
    parts = [merged, *merged.get("ranks", [])]
    assert len(parts) == heir
    for rank, part in enumerate(parts):
        of = rank if rank < donor else 0
        assert part["random"] == f"heir's random {rank}"
        for key in ("position", "objects", "task"):
            assert part[key] == f"donor's {key} {of}"
        if rank:
            assert part["sums"] == (f"donor's sums {rank}" if of else {})


@pytest.mark.parametrize("kept", [None, {"random": 1, "position": 2}])
@pytest.mark.parametrize(("donor", "heir"), [(2, 2), (1, 3), (2, 3), (3, 2), (3, 1)])
def test_ranks_of_a_loop_take_what_theirs_yielded(
    tmp_path: Path, donor: int, heir: int, kept: dict[str, Any] | None
) -> None:
    """Whatever the keys are called. One that the donor did not have takes nothing."""

    def state(name: str, ranks: int) -> dict[str, Any]:
        others = [kept and {**kept, "of": f"{name} {rank}"} for rank in range(1, ranks)]
        return {"format": 1, "loop": {"of": name}} | ({"ranks": others} if others else {})

    merged = _inherit(tmp_path, state("donor", donor), state("heir", heir))
    assert merged["loop"] == {"of": "donor"}
    of_ranks = merged.get("ranks", [])
    assert len(of_ranks) == heir - 1
    for rank, part in enumerate(of_ranks, start=1):
        has = kept is not None and rank < donor
        assert part == ({**kept, "of": f"donor {rank}"} if has else None)


def test_further_ranks_keep_their_place_in_the_data(tmp_path: Path) -> None:
    _inherit(tmp_path, _task_state("donor", 2), _task_state("heir", 2))
    own = {**newest(tmp_path / "heir"), "progress": {"reports": 3, "since_report": 0}}
    again = with_inheritance(tmp_path / "heir", own, [])
    assert again is not None
    assert again["position"] == "heir's position 0"
    (second,) = again["ranks"]
    assert {key: value for key, value in second.items() if "donor" in value} == {
        key: f"donor's {key} 1" for key in ("objects", "task")
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
@pytest.mark.parametrize("part", ["state.pt", "manifest.json", "generation", "link"])
def test_checkpoints_of_another_user_are_not_taken(
    tmp_path: Path, heir: Path, train: Train, part: str
) -> None:
    """Whoever copies one would be its owner, and a resume makes objects of what it names."""
    donor = tmp_path / "donor"
    of_donor, of_heir = saved(donor), inherited(heir)
    assert of_heir is not None
    for place in (of_donor.path, of_heir.path):
        theirs = place if part == "generation" else place / part
        if part == "link":
            theirs = place / "state.pt"
            theirs.rename(own := tmp_path / f"own-{place.parent.parent.name}")
            theirs.symlink_to(own)
        os.chown(theirs, 12345, 12345, follow_symlinks=False)
    for take in (
        lambda: link_checkpoint_from_donor(of_donor, tmp_path / "new"),
        lambda: copy_generations(LocalFiles.of(donor), LocalFiles.of(tmp_path / "new")),
        lambda: train(donor, 3, seed=1, **DONOR),
        lambda: train(heir, 3, seed=2, **HEIR),
    ):
        with pytest.raises(ForeignCheckpoint, match="belongs to user 12345"):
            take()
    assert not (tmp_path / "new").exists()
