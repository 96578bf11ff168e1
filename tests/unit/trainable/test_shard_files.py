"""Checkpoints in shards: complete or not visible, whole when read, each damaged bit found."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.trainable.test_objects import Bucket
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import (
    OutOfMemory,
    RankFailed,
    RankLost,
    StorageError,
    TrainingError,
)
from trainable.failures import failure_of
from trainable.ranks import Ranks
from trainable.store.generations import MANIFEST, STATE, Files
from trainable.store.local import LocalFiles
from trainable.store.objects import ObjectFiles
from trainable.store.shard_files import ShardGroup, Shards
from trainable.store.sharded_state import SHARDS, cut, joined, split
from trainable.store.snapshot import write_state
from trainable.warm_start import copy_generations, link_checkpoint_from_donor

WEIGHT = torch.arange(15.0).reshape(5, 3)


class _First(Ranks):
    """The first of two ranks; the second writes its shard when the first has."""

    size = 2
    problem: dict[str, Any] | None = None

    def __init__(self, files: Files) -> None:
        self.files = files
        self.begun = ""

    def agree(self, value: Any) -> Any:
        self.begun = value[1]
        return value

    def gather_plain(self, value: Any, *_: Any, **__: Any) -> list[Any]:
        notes: list[Any] = []
        if self.problem is None:
            self.files.add_shard(
                self.begun,
                "shard-00001.pt",
                lambda file: notes.append(write_state(_taken_apart(1)[SHARDS], file)),
            )
        return [value, [notes, self.problem]]


def _taken_apart(rank: int, step: int = 0) -> dict[str, Any]:
    whole = WEIGHT + step
    state: dict[str, Any] = {"step": step, "model": {"weight": whole, "tied": whole, "bias": 1}}
    local: Callable[[Tensor], Tensor] = lambda tensor: cut(tensor, rank, 2).clone()  # noqa: E731
    noted, parts = split(state, local)
    return {**noted, SHARDS: parts}


def _store(files: Files, tmp_path: Path, keep: int = 2) -> CheckpointStore:
    config = CheckpointConfig.model_validate({"every": "1 epoch", "keep": keep})
    store = CheckpointStore(tmp_path, config, metric="val/loss", files=files)
    store.shard_group = ShardGroup(files, _First(files))
    return store


def _save(store: CheckpointStore, step: int) -> None:
    store.save(lambda: _taken_apart(0), step=step, reports=step)
    store.wait()


def _files(kind: str, tmp_path: Path) -> Files:
    return LocalFiles(tmp_path / "checkpoints") if kind == "local" else ObjectFiles(Bucket(), "b")


@pytest.fixture(params=["local", "objects"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return _files(request.param, tmp_path)


def test_shards_are_read_as_a_whole_state(files: Files, tmp_path: Path) -> None:
    store = _store(files, tmp_path)
    for step in (1, 2, 3):
        _save(store, step)
    reader = CheckpointStore(tmp_path, files=files)
    assert [found.step for found in reader.generations()] == [2, 3]  # the first one is removed
    newest = reader.newest()
    assert newest is not None
    assert newest.files == (STATE, "shard-00000.pt", "shard-00001.pt", MANIFEST)
    state = reader.load(newest.address)
    assert torch.equal(state["model"]["weight"], WEIGHT)
    assert state["model"]["tied"] is state["model"]["weight"]
    store.close()


def test_parts_of_a_rank_are_in_its_shard(tmp_path: Path) -> None:
    store = _store(_files("local", tmp_path), tmp_path)
    _save(store, 1)
    noted = store.resume(in_shards=True)
    assert noted is not None
    shards = Shards(noted)
    assert len(shards) == 2
    assert torch.equal(shards[1]["model"][0], WEIGHT[3:])
    assert torch.equal(joined(noted, shards.all())["model"]["weight"], WEIGHT)
    store.close()


def test_each_damaged_bit_of_each_file_is_found(tmp_path: Path) -> None:
    files = _files("local", tmp_path)
    store = _store(files, tmp_path)
    for step in (1, 2):
        _save(store, step)
    store.close()
    newest = CheckpointStore(tmp_path, files=files).newest()
    assert newest is not None
    chance = random.Random(7)
    for file in newest.files:
        path = newest.path / file
        content = path.read_bytes()
        for bit in chance.sample(range(8 * len(content)), 100):
            damaged = bytearray(content)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            found = CheckpointStore(tmp_path, files=files).newest()
            assert found is not None
            assert found.step == 1, f"bit {bit} of {file}"
        path.write_bytes(content)


def test_damaged_shard_goes_to_quarantine_with_all_files(files: Files, tmp_path: Path) -> None:
    store = _store(files, tmp_path)
    for step in (1, 2):
        _save(store, step)
    newest = store.newest()
    assert newest is not None
    store.close()
    if isinstance(files, LocalFiles):
        (newest.path / "shard-00001.pt").write_bytes(b"x")
    else:
        assert isinstance(files, ObjectFiles)
        files._system.pipe_file(f"b/{newest.name}/shard-00001.pt", b"x")
    again = _store(files, tmp_path)
    assert again.resume() is not None
    assert f"{newest.address}/shard-00001.pt has 1 bytes" in again.set_aside[0]
    assert [found.step for found in again.generations()] == [1]
    (name,) = files.damaged()
    assert all(files.length(name, file) for file in newest.files)
    again.close()


def test_kill_between_shards_and_manifest_shows_nothing(files: Files, tmp_path: Path) -> None:
    store = _store(files, tmp_path)
    _save(store, 1)
    name = files.unused(2)
    begun = files.begin(name)
    files.add_shard(begun, "shard-00000.pt", lambda file: file.write(b"half"))
    reader = CheckpointStore(tmp_path, files=files)
    assert [found.step for found in reader.generations()] == [1]
    fresh = LocalFiles(tmp_path / "checkpoints") if isinstance(files, LocalFiles) else files
    if isinstance(files, ObjectFiles):
        fresh = ObjectFiles(files._system, "b")
    again = _store(fresh, tmp_path)
    assert [found.step for found in again.generations()] == [1]
    again.close()
    assert not list(tmp_path.rglob(f"*{name}*"))


def test_rank_that_cannot_write_fails_the_save(files: Files, tmp_path: Path) -> None:
    store = _store(files, tmp_path)
    _save(store, 1)
    first = _First(files)
    first.problem = {"parts": [28, "No space left"], "path": "", "host": "other"}
    store.shard_group = ShardGroup(files, first)
    store.save(lambda: _taken_apart(0), step=2, reports=2)
    with pytest.raises(StorageError, match=r"step 2 .* No space left \(rank 1\)") as raised:
        store.wait()
    failure = failure_of(raised.value)
    assert (failure["errno"], failure["host"]) == (28, "other")
    assert [found.step for found in CheckpointStore(tmp_path, files=files).generations()] == [1]
    store.close()


@pytest.mark.parametrize("error", [RankLost("rank 1"), OutOfMemory("rank 1"), RankFailed("")])
def test_save_fails_as_the_other_rank_has(tmp_path: Path, error: TrainingError) -> None:
    files = _files("local", tmp_path)
    store, first = _store(files, tmp_path), _First(files)

    def gather_plain(value: Any) -> list[Any]:
        del value
        raise error

    first.gather_plain = gather_plain  # type: ignore[method-assign]
    store.shard_group = ShardGroup(files, first)
    store.save(lambda: _taken_apart(0), step=2, reports=2)
    with pytest.raises(type(error)) as raised:
        store.wait()
    assert raised.value is error
    store.close()
    assert not CheckpointStore(tmp_path, files=files).generations()


def test_shards_are_inherited_and_copied(tmp_path: Path) -> None:
    local = _files("local", tmp_path)
    store = _store(local, tmp_path)
    _save(store, 1)
    newest = store.newest()
    assert newest is not None
    store.close()
    link_checkpoint_from_donor(newest, tmp_path / "heir")
    (linked,) = (tmp_path / "heir/inherited").glob("step-*")
    assert sorted(path.name for path in linked.iterdir()) == sorted(newest.files)
    target: Any = ObjectFiles(Bucket(), "copy")
    copy_generations(local, target)
    copied = CheckpointStore(tmp_path, files=target).newest()
    assert copied is not None
    assert copied.shards == newest.shards
