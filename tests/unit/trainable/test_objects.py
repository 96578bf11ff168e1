"""Checkpoints in an object store: no rename, no sync; the manifest commits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import WriterReplaced
from trainable.store.generations import MANIFEST, STATE
from trainable.store.objects import SCHEME, ObjectFiles
from trainable.warm_start import copy_generations


class Killed(BaseException):
    """Stands for SIGKILL before one request to the store."""


class Bucket(MemoryFileSystem):
    """A store in memory without a rename, that dies at a request of choice, or waits there while
    something else happens.
    """

    protocol = "bucket"
    cachable = False
    store: dict = {}  # noqa: RUF012  its own, not the one that all memory file systems share
    pseudo_dirs = [""]  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.store, self.pseudo_dirs = {}, [""]
        self.num_requests, self.die_at = 0, -1
        self.wait_at, self.meanwhile = -1, None

    def _request(self):
        if self.num_requests == self.die_at:
            raise Killed
        if self.num_requests == self.wait_at:
            self.wait_at = -1
            self.meanwhile()
        self.num_requests += 1

    def mv(self, *_, **__):
        raise AssertionError("an object store has no rename")

    def pipe_file(self, *arguments, **options):
        self._request()
        return super().pipe_file(*arguments, **options)

    def _open(self, *arguments, **options):
        if options.get("mode", arguments[1:2] and arguments[1]) == "wb":
            self._request()
        return super()._open(*arguments, **options)

    def cp_file(self, *arguments, **options):
        self._request()
        return super().cp_file(*arguments, **options)

    def rm_file(self, path):
        self._request()
        return super().rm_file(path)


def _store(bucket, tmp_path, **options):
    files = ObjectFiles(bucket, tmp_path)
    config = CheckpointConfig(keep=2)
    return CheckpointStore(tmp_path, config, metric="val/loss", files=files, **options)


def _reader(bucket, tmp_path):
    return CheckpointStore(tmp_path, files=ObjectFiles(bucket, tmp_path))


def _save(store, step, value=None, *, whose=0.0):
    state = {"step": step, "weights": torch.arange(4.0) + step, "whose": whose}
    store.save(lambda: state, step=step, reports=step, value=value)
    store.wait()
    return store.pointer


def _key(pointer):
    return pointer.address.removeprefix(SCHEME)


def _steps(bucket, tmp_path):
    return [g.step for g in _reader(bucket, tmp_path).generations()]


@pytest.mark.parametrize("damaged", [False, True])
def test_kill_at_every_request_leaves_the_newest_checkpoint(tmp_path, damaged):
    die_at = 0
    while True:
        bucket = Bucket()
        store = _store(bucket, tmp_path)
        for step, value in ((1, 0.1), (2, 0.2), (3, 0.3)):
            _save(store, step, value)
        if damaged:
            bucket.pipe_file(f"{_key(store.pointer)}/{STATE}", b"x" * 1000)
        committed = [2 if damaged else 3]
        bucket.num_requests, bucket.die_at = 0, die_at
        try:
            store = _store(bucket, tmp_path)
            store.resume()
            for step in (4, 5):
                _save(store, step, 0.1 * step)
                committed.append(step)
            store.close()
        except Killed:
            bucket.die_at = -1
            reader = _reader(bucket, tmp_path)
            assert reader.newest().step - committed[-1] in (0, 1, 4 - committed[-1])
            assert reader.best().step == 1
            again = _store(bucket, tmp_path)
            assert again.resume()["step"] == reader.newest().step
            again.close()
        else:
            break
        die_at += 1
    assert die_at > 10
    assert _steps(bucket, tmp_path) == [1, 4, 5]
    quarantine = bucket.find(str(tmp_path / "quarantine"))
    assert len(quarantine) == (2 if damaged else 0)
    assert not bucket.exists(str(tmp_path / "writer"))


def test_kill_at_every_request_of_a_first_writer_loses_nothing(tmp_path):
    die_at, last = 0, False
    while not last:
        bucket, committed = Bucket(), [None]
        bucket.die_at = die_at
        try:
            store = _store(bucket, tmp_path)
            for step in (1, 2, 3):
                _save(store, step)
                committed.append(step)
            store.close()
            last = True
        except Killed:
            pass
        bucket.die_at = -1
        again = _store(bucket, tmp_path)
        found = again.resume()
        assert again.set_aside == []
        # Its manifest may have been the last that arrived.
        assert (found and found["step"]) in (committed[-1], (committed[-1] or 0) + 1)
        _save(again, 9)
        again.close()
        objects = bucket.find(str(tmp_path))
        assert {path.rpartition("/")[2] for path in objects} == {STATE, MANIFEST}
        assert len(objects) == 2 * len(_steps(bucket, tmp_path))
        die_at += 1
    assert die_at > 8


def test_state_without_manifest_is_removed_by_the_next_writer(tmp_path):
    bucket = Bucket()
    store = _store(bucket, tmp_path)
    _save(store, 1)
    bucket.pipe_file(str(tmp_path / "step-00000009" / STATE), b"half")
    assert _reader(bucket, tmp_path).newest().step == 1
    _store(bucket, tmp_path)
    assert not bucket.exists(str(tmp_path / "step-00000009"))


def test_replaced_writer_gets_an_error_and_commits_nothing(tmp_path):
    bucket = Bucket()
    stale = _store(bucket, tmp_path)
    _save(stale, 1)
    successor = _store(bucket, tmp_path)
    with pytest.raises(WriterReplaced, match="another process has taken over"):
        _save(stale, 2)
    _save(successor, 3)
    assert _steps(bucket, tmp_path) == [1, 3]
    stale.close()
    assert bucket.exists(str(tmp_path / "writer"))


def _stale_writer(bucket, tmp_path, wait_at: int, meanwhile: Callable[[], None]):
    """A writer that stands still at a request of its second save: 0 uploads the state, 1 writes
    the manifest.
    """
    stale = _store(bucket, tmp_path)
    _save(stale, 1)
    bucket.num_requests, bucket.wait_at, bucket.meanwhile = 0, wait_at, meanwhile
    return stale


def test_upload_of_replaced_writer_changes_no_checkpoint(tmp_path):
    bucket, told = Bucket(), []

    def replace() -> None:
        told.append(_save(_store(bucket, tmp_path), 2, whose=1.0))

    stale = _stale_writer(bucket, tmp_path, 0, replace)
    with pytest.raises(WriterReplaced):
        _save(stale, 2)
    again = _store(bucket, tmp_path)
    assert again.load(told[0])["whose"] == again.resume()["whose"] == 1.0
    assert (again.set_aside, _steps(bucket, tmp_path)) == ([], [1, 2])
    assert len(bucket.find(str(tmp_path))) == 5, "two generations and the writer's signature"


@pytest.mark.parametrize("successors", [[0], [1], [2], [0, 0], [0, 1]])
def test_late_manifest_of_replaced_writer_is_ignored(tmp_path, successors):
    bucket, steps = Bucket(), [1]

    def replace() -> None:  # by writers that die after so many generations
        for saves in successors:
            successor = _store(bucket, tmp_path)
            assert successor.resume()["step"] == steps[-1]
            for step in range(2, 2 + saves):
                _save(successor, step, whose=1.0)
                steps.append(step)

    late = _save(_stale_writer(bucket, tmp_path, 1, replace), 2)
    assert bucket.exists(f"{_key(late)}/{MANIFEST}")
    assert _steps(bucket, tmp_path) == steps[-2:]
    again = _store(bucket, tmp_path)
    assert again.resume()["step"] == steps[-1]
    assert (again.set_aside, _steps(bucket, tmp_path)) == ([], steps[-2:])
    assert not bucket.exists(_key(late))


def test_late_manifest_after_successor_closed_is_set_aside(tmp_path):
    bucket = Bucket()
    _save(_stale_writer(bucket, tmp_path, 1, lambda: _store(bucket, tmp_path).close()), 2)
    again = _store(bucket, tmp_path)
    assert again.resume()["step"] == 1
    assert len(again.set_aside) == 1


def test_commit_just_before_the_fence_counts(tmp_path):
    bucket = Bucket()
    stale = _store(bucket, tmp_path)
    _save(stale, 1)
    bucket.num_requests, bucket.wait_at, bucket.meanwhile = 0, 0, lambda: _save(stale, 2)
    successor = _store(bucket, tmp_path)
    assert successor.resume()["step"] == 2
    assert _steps(bucket, tmp_path) == [1, 2]


def test_checkpoint_may_vanish_while_being_removed(tmp_path):
    bucket = Bucket()
    store = _store(bucket, tmp_path)
    first = _save(store, 1)
    _save(store, 2)
    request = bucket.num_requests + 3  # the state, the manifest (twice counted), the removal
    bucket.wait_at, bucket.meanwhile = (
        request,
        lambda: bucket.store.pop(f"{_key(first)}/{MANIFEST}"),
    )
    _save(store, 3)
    assert _steps(bucket, tmp_path) == [2, 3]
    assert not bucket.exists(_key(first))


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("at", [0, 2])
def test_checkpoints_of_a_concurrent_writer_stay(tmp_path, at, closes):
    bucket = Bucket()
    _save(_store(bucket, tmp_path), 1)

    def overtake() -> None:
        successor = _store(bucket, tmp_path)
        for step in (2, 3):
            _save(successor, step, 0.1 * step)
        if closes:
            successor.close()

    bucket.num_requests, bucket.wait_at, bucket.meanwhile = 0, at, overtake
    with contextlib.nullcontext() if at == 0 else pytest.raises(WriterReplaced):
        assert _store(bucket, tmp_path).resume()["step"] == 3
    again = _store(bucket, tmp_path)
    assert again.resume()["step"] == 3
    assert (again.set_aside, _steps(bucket, tmp_path)) == ([], [2, 3])


@pytest.mark.parametrize("signature", [b"", b"0f3a91c2d4e5", b"0f3a91c2d4e5\nste"])
def test_interrupted_fence_keeps_checkpoints(tmp_path, signature):
    bucket = Bucket()
    _save(_store(bucket, tmp_path), 1)
    bucket.pipe_file(str(tmp_path / "writer"), signature)
    assert _steps(bucket, tmp_path) == [1]
    again = _store(bucket, tmp_path)
    assert again.resume()["step"] == 1


def test_generations_are_copied_once_within_a_bucket(tmp_path):
    bucket, target = Bucket(), tmp_path / "copy"
    with contextlib.closing(_store(bucket, tmp_path)) as store:
        for step in (1, 2):
            _save(store, step, 1.0 / step)
    for _ in range(2):
        copy_generations(ObjectFiles(bucket, tmp_path), ObjectFiles(bucket, target))
        copied, there = _reader(bucket, target), _reader(bucket, tmp_path)
        assert [(g.number, g.step, g.value, g.sha256) for g in copied.generations()] == [
            (g.number, g.step, g.value, g.sha256) for g in there.generations()
        ]
    assert copied.load(copied.newest())["step"] == 2
    assert not bucket.exists(str(target / "writer"))
