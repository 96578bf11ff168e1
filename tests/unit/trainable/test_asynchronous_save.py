"""Asynchronous saving: what is saved, what waits, and where errors are raised."""

from __future__ import annotations

import io
import threading
import time

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from tests.fake_checkpoints import save_if_due
from tests.saved_objects import Seen
from trainable.checkpoint import CheckpointStore
from trainable.config import CheckpointConfig
from trainable.errors import CheckpointError, StorageError
from trainable.store.local import LocalFiles
from trainable.store.objects import ObjectFiles
from trainable.store.snapshot import Snapshots, parse_state, snapshot, write_state


class Gated(LocalFiles):
    """Writes generations only while the gate is open."""

    def __init__(self, root):
        super().__init__(root)
        self.gate, self.reached = threading.Event(), threading.Event()

    def commit(self, name, write):
        self.reached.set()
        assert self.gate.wait(30), "nobody opened the gate"
        super().commit(name, write)


class Full(LocalFiles):
    """A disk without room from the given step on."""

    step = 2

    def commit(self, name, write):
        if int(name.rpartition("-")[2]) >= self.step:
            raise OSError(28, "No space left on device")
        super().commit(name, write)


class _Narrow:
    """A file with room for a mebibyte."""

    def __init__(self, file):
        self._file, self._room = file, 2**20

    def write(self, part):
        self._room -= len(part)
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return self._file.write(part)

    def flush(self):
        self._file.flush()


class NarrowDirectory(LocalFiles):
    def commit(self, name, write):
        super().commit(name, lambda file: write(_Narrow(file)))


class NarrowBucket(ObjectFiles):
    def commit(self, name, write):
        super().commit(name, lambda file: write(_Narrow(file)))


def _put_under(trainer, files):
    """Let an opened run's generations be written by these files."""
    files.open()
    trainer.store._files = files


def _bytes(state):
    content = io.BytesIO()
    write_state(state, content)
    return content.getvalue()


def _store(directory, files, every="1 step", **options):
    config = CheckpointConfig.model_validate({"every": every})
    return CheckpointStore(directory, config, metric="val/loss", files=files, **options)


def _save_if_due(store, step, state=dict, **options):
    return save_if_due(store, state, step=step, epoch=0, **options)


class Run:
    """A run that saves every second step, with a copy of its state after each of its steps."""

    def __init__(self, opened, configure, directory, task, last):
        self.states, self.store, self._last = {}, CheckpointStore(directory), last
        config = configure(every="2 steps", optimizer={"lr": 0.1})
        self.trainer = opened(config, directory, task, should_stop=self._after_step)

    def __reduce__(self):  # says itself that none of it is state of a task that refers to it
        return Run, ()

    @property
    def step(self):
        return self.trainer.state.progress.step

    def looked(self, step):
        """Called after each step."""

    def _after_step(self):
        self.states.setdefault(self.step, snapshot(self.trainer.state.state_dict()))
        self.looked(self.step)
        return self.step == self._last

    def train(self):
        """Train to the last step; each generation has the state of its step."""
        list(self.trainer.events())
        found = {one.step: self.store.load(one) for one in self.store.generations()}
        for step, state in found.items():
            assert _bytes(state) == _bytes(parse_state(_bytes(self.states[step])))
        return found


@pytest.mark.seeds("S16 asynchronous")
def test_training_continues_while_the_state_is_written(tmp_path, opened, configure, toy):
    """Every step after the second changes the parameters while its state is not yet on disk."""
    pointers, files = [], Gated.of(tmp_path)

    def look(step):
        pointers.append(run.trainer.store.pointer)
        if step == 3:
            assert files.reached.wait(30)  # of step 2, and it does not get further yet
        if step == 4:
            files.gate.set()

    run = Run(opened, configure, tmp_path, toy(samples=96), last=4)
    run.looked = look
    _put_under(run.trainer, files)
    assert list(run.train()) == [2, 4]
    assert pointers[:4] == [None] * 4
    assert not torch.equal(*(run.states[step]["model"]["0.weight"] for step in (2, 3)))


@pytest.mark.seeds("S16 asynchronous")
def test_next_step_waits_for_the_copy_of_moments(tmp_path, opened, configure, toy, monkeypatch):
    """They are copied beside the next forward and backward pass, and no later than these."""
    begun, copied, seen = threading.Event(), threading.Event(), Seen()
    finish = Snapshots.finish

    def finish_late(self):
        assert begun.wait(30)  # the next pass forward, while nothing of this is copied
        time.sleep(0.1)  # most of the time its step would come first
        finish(self)
        copied.set()

    class Watched(toy):
        def loss(self, model, batch):
            if run.step == 2:
                seen.append(copied.is_set())
                begun.set()
            return super().loss(model, batch)

    monkeypatch.setattr(Snapshots, "finish", finish_late)
    run = Run(opened, configure, tmp_path, Watched(samples=96), last=3)
    run.looked = lambda step: seen.append(copied.is_set()) if step == 3 else None
    found = run.train()
    assert seen[:2] == [False, True]
    moments = [found[step]["optimizer"]["state"][0]["exp_avg"] for step in (2, 3)]
    assert not torch.equal(*moments)


@pytest.mark.parametrize("undone", [True, False])
def test_parameters_are_copied_before_the_next_forward(
    undone, tmp_path, opened, configure, toy, monkeypatch
):
    """As adversarial training does: perturb an embedding past autograd, use it, put it back."""
    written, copied, late = threading.Event(), threading.Event(), []
    finish = Snapshots.finish

    def finish_late(self):
        late.append(len(self._unfinished))
        assert written.wait(30)
        finish(self)
        copied.set()

    class Adversarial(toy):
        def loss(self, model, batch):
            if not model.training:
                return super().loss(model, batch)
            weight = model[0].weight.data
            backup = weight.clone()
            weight += 0.5
            part = super().loss(model, batch)
            if run.step == 2:
                written.set()
                assert copied.wait(30)
            if undone:
                weight.copy_(backup)
            return part

    monkeypatch.setattr(Snapshots, "finish", finish_late)
    run = Run(opened, configure, tmp_path, Adversarial(samples=96), last=3)
    run.train()
    # two moments, and a count each
    assert late == [3 * len(list(run.trainer.model.parameters()))] * 2


def test_pointer_names_only_what_is_committed(tmp_path):
    files = Gated.of(tmp_path)
    store = _store(tmp_path, files)
    assert _save_if_due(store, 1)
    assert files.reached.wait(30)
    assert store.pointer is None
    assert store.newest() is None
    files.gate.set()
    store.wait()
    assert store.pointer == store.newest().pointer
    assert store.pointer.step == 1


def test_one_write_at_a_time_and_the_next_waits(tmp_path):
    files = Gated.of(tmp_path)
    store = _store(tmp_path, files)
    _save_if_due(store, 1)
    second = threading.Thread(
        target=_save_if_due, args=(store, 2, lambda: order.append("copied") or {})
    )
    order = []
    assert files.reached.wait(30)
    second.start()
    order.append("opened")
    files.gate.set()
    second.join()
    store.wait()
    assert [g.step for g in store.generations()] == [1, 2]
    assert sorted(order) == ["copied", "opened"]


def test_interval_in_seconds_never_blocks_training(tmp_path):
    now, files = [0.0], Gated.of(tmp_path)
    store = _store(tmp_path, files, every="1 second", clock=lambda: now[0])
    saves = []
    for step in range(1, 5):
        now[0] += 1.0
        saves.append(_save_if_due(store, step))
    assert saves == [True, False, False, False]
    files.gate.set()
    assert _save_if_due(store, 5, new_best=True)  # a best is never left out; it waits
    store.wait()
    assert [g.step for g in store.generations()] == [1, 5]


@pytest.mark.parametrize("meet", ["wait", "is_due"])
def test_error_comes_out_once_and_leaves_the_rest(tmp_path, meet):
    store = _store(tmp_path, Full.of(tmp_path))
    _save_if_due(store, 1)
    _save_if_due(store, 2)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left"):
        store.wait() if meet == "wait" else _save_if_due(store, 3)
    store.wait()
    assert CheckpointStore(tmp_path).newest().step == store.pointer.step == 1


@pytest.mark.parametrize("layer", ["directory", "bucket"])
def test_full_disk_during_a_tensor_keeps_no_partial_state(tmp_path, layer):
    bucket = NarrowBucket(MemoryFileSystem(), tmp_path)
    files = NarrowDirectory.of(tmp_path) if layer == "directory" else bucket
    store = _store(tmp_path, files)
    _save_if_due(store, 1)
    _save_if_due(store, 2, lambda: {"weights": torch.ones(2**19)})
    with pytest.raises(StorageError, match=r"step 2 \(2097152 bytes\) .*No space left"):
        store.wait()
    assert store.pointer.step == store.newest().step == 1
    assert not list(tmp_path.glob("checkpoints/.writing-*/*"))
    store.close()


def test_error_in_close_still_closes_the_curve(tmp_path, opened, configure, toy):
    trainer = opened(configure(epochs=3), tmp_path, toy())
    full = Full.of(tmp_path)
    full.step = 0
    _put_under(trainer, full)
    next(trainer.events())
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.close()
    assert trainer._history._file.closed


def test_unserializable_state_is_an_error(tmp_path):
    store = _store(tmp_path, None)
    with pytest.raises(
        CheckpointError, match=r"step 1 failed .*earlier checkpoints are untouched"
    ):
        _save_if_due(store, 1, lambda: {"x": _Unpicklable()}, final=True)


class _Unpicklable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("not this one")


def test_snapshot_shares_memory_only_as_the_state_does():
    tied = nn.Linear(3, 3)
    model = nn.Sequential(tied, nn.BatchNorm1d(3))
    model.add_module("head", nn.Linear(3, 3))
    model.head.weight = tied.weight
    original = {
        "model": model.state_dict(),
        "column": torch.arange(6.0).view(2, 3).t(),
        "bits": [torch.tensor([True]), (torch.tensor(7, dtype=torch.uint8), 1.5)],
        "imaginary": torch.ones(2, dtype=torch.complex64).conj(),
        "parameter": nn.Parameter(torch.ones(2), requires_grad=False),
    }
    expected = parse_state(_bytes(original))
    copied = snapshot(original)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), original["column"]]:
            tensor.fill_(9)
    found = parse_state(_bytes(copied))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found["column"].stride() == expected["column"].stride()
    assert type(found["parameter"]) is nn.Parameter
    assert found["model"]._metadata == expected["model"]._metadata
    weights = found["model"]
    assert weights["0.weight"].data_ptr() == weights["head.weight"].data_ptr()


def test_async_copied_tensors_are_copied_at_the_end():
    snapshots, shared = Snapshots(), torch.ones(2)
    for value in (1.0, 2.0):  # into new memory, then into the same again
        state = {
            "model": {"shared": shared, "other": torch.full((3,), value)},
            "moments": [torch.full((3,), value), shared, torch.full((2,), value).to_sparse()],
        }
        copied = snapshots.take(state, ["moments"])
        state["model"]["other"].fill_(9)
        shared.fill_(value + 1)
        state["moments"][0].fill_(value + 5)  # nobody may, but it shows when it is copied
        snapshots.finish()
        assert copied["moments"][0].tolist() == [value + 5] * 3
        assert copied["moments"][1] is copied["model"]["shared"]
        assert copied["moments"][1].tolist() == [value] * 2
        assert copied["moments"][2].to_dense().tolist() == [value] * 2
        assert copied["model"]["other"].tolist() == [value] * 3


def test_copy_that_fails_is_an_error_of_the_save(tmp_path, monkeypatch):
    def finish(_):
        raise MemoryError("no more")

    monkeypatch.setattr(Snapshots, "finish", finish)
    store = _store(tmp_path, LocalFiles.of(tmp_path))
    store.async_copy_keys = ["moments"]
    assert _save_if_due(store, 1)
    store.wait_for_copy()
    with pytest.raises(CheckpointError, match=r"step 1 failed \(MemoryError: no more\)"):
        store.wait()
    assert store.generations() == []


def _addresses(tensors):
    return {tensor.data_ptr() for tensor in tensors if tensor.layout is torch.strided}


def test_next_snapshot_reuses_memory():
    """Whatever became of the state meanwhile: other values, shapes, kinds of memory."""
    snapshots = Snapshots()
    states = [
        {"a": torch.ones(3, 4), "b": [torch.zeros(3, 4)], "tied": torch.ones(3, 4)},
        {
            "a": torch.rand(3, 4),
            "b": [torch.rand(4, 3).t()],
            "wide": torch.rand(1, 4).expand(3, 4),
        },
        {"a": torch.rand(3, 4).double(), "b": [torch.ones(2, dtype=torch.complex64).conj()]},
        {"a": nn.Parameter(torch.rand(3, 4)), "b": [torch.eye(3).to_sparse()]},
        {"a": torch.rand(3, 4), "b": [torch.rand(3, 4)]},
    ]
    states[0]["tied"] = states[0]["a"]
    places = []
    for state in states:
        copied = snapshots.take(state)
        torch.testing.assert_close(copied, state, rtol=0, atol=0)
        assert copied["a"].data_ptr() != state["a"].data_ptr()
        assert type(copied["a"]) is type(state["a"])
        places.append({copied["a"].data_ptr(), *_addresses(copied["b"])})
        if "tied" in state:
            assert copied["tied"] is copied["a"]
    assert len(places[0] & places[1]) == 1  # the transposed one is new
    assert states[0]["a"].sum() == 12
