"""Saving beside the training: what is saved, who waits for whom, and where errors come out."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from trainable.checkpoint import CheckpointStore, Files
from trainable.config import CheckpointConfig
from trainable.errors import CheckpointError
from trainable.snapshot import format_state, parse_state, snapshot


class Gated(Files):
    """Writes states only while the gate is open."""

    def __init__(self):
        self.gate, self.reached = threading.Event(), threading.Event()

    def write(self, path, content):
        self.reached.set()
        assert self.gate.wait(30), "nobody opened the gate"
        super().write(path, content)


class Full(Files):
    """A disk without room from the given step on."""

    def __init__(self, step):
        self.step = step

    def write(self, path, content):
        if int(path.parent.name.rpartition("-")[2]) >= self.step:
            raise OSError(28, "No space left on device")
        super().write(path, content)


def _store(directory, files, every="1 step", **options):
    config = CheckpointConfig.model_validate({"every": every})
    return CheckpointStore(directory, config, metric="val/loss", files=files, **options)


def _offer(store, step, state=dict, **options):
    return store.offer(state, step=step, epoch=0, **options)


@pytest.mark.seeds("S16 asynchronous")
def test_training_goes_on_while_the_state_of_its_step_is_written(tmp_path, opened, configure, toy):
    """Every step after the second changes the parameters while its state is not yet on disk."""
    files, states, pointers = Gated(), {}, []

    def interrupted():
        step = trainer.state.progress.step
        if step <= 4:
            states[step] = snapshot(trainer.state.state_dict())
            pointers.append(trainer.store.pointer)
        if step == 3:
            assert files.reached.wait(30)  # of step 2, and it does not get further yet
        if step == 4:
            files.gate.set()
        return step == 4

    config = configure(every="2 steps", optimizer={"lr": 0.1})
    trainer = opened(config, tmp_path, toy(samples=96), interrupted=interrupted)
    trainer.store._files = files
    list(trainer.events())
    assert pointers == [None] * 4
    store = CheckpointStore(tmp_path)
    assert [g.step for g in store.generations()] == [2, 4]
    for generation in store.generations():
        found, expected = store.load(generation), states[generation.step]
        assert found["progress"]["step"] == generation.step
        assert format_state(found) == format_state(parse_state(format_state(expected)))
    assert not torch.equal(states[2]["model"]["0.weight"], states[3]["model"]["0.weight"])


@pytest.mark.seeds("S16 asynchronous")
def test_pointer_names_only_what_is_committed(tmp_path):
    files = Gated()
    store = _store(tmp_path, files)
    assert _offer(store, 1)
    assert files.reached.wait(30)
    assert store.pointer is None
    assert store.newest() is None
    files.gate.set()
    store.wait()
    assert store.pointer == store.newest().pointer
    assert store.pointer.step == 1


def test_only_one_is_written_at_a_time_and_the_next_one_waits(tmp_path):
    files = Gated()
    store = _store(tmp_path, files)
    _offer(store, 1)
    second = threading.Thread(target=_offer, args=(store, 2, lambda: order.append("copied") or {}))
    order = []
    assert files.reached.wait(30)
    second.start()
    order.append("opened")
    files.gate.set()
    second.join()
    store.wait()
    assert [g.step for g in store.generations()] == [1, 2]
    assert sorted(order) == ["copied", "opened"]


def test_interval_in_seconds_never_holds_up_the_training(tmp_path):
    now, files = [0.0], Gated()
    store = _store(tmp_path, files, every="1 second", clock=lambda: now[0])
    saves = []
    for step in range(1, 5):
        now[0] += 1.0
        saves.append(_offer(store, step))
    assert saves == [True, False, False, False]
    files.gate.set()
    assert _offer(store, 5, new_best=True)  # a best is never left out; it waits
    store.wait()
    assert [g.step for g in store.generations()] == [1, 5]


def test_end_waits_for_its_commit(tmp_path):
    store = _store(tmp_path, None)
    _offer(store, 1)
    _offer(store, 2, final=True)
    assert store.pointer == store.newest().pointer
    assert store.pointer.step == 2


def test_last_report_names_the_last_generation(tmp_path, opened, configure, toy):
    trainer = opened(configure(every="100 epochs"), tmp_path, toy())
    reports = list(trainer.events())
    assert reports[-1].finished
    assert reports[-1].checkpoint == CheckpointStore(tmp_path).newest().pointer
    assert reports[-1].checkpoint.step == reports[-1].step


@pytest.mark.parametrize("meet", ["wait", "offer"])
def test_error_comes_out_once_and_leaves_the_rest(tmp_path, meet):
    store = _store(tmp_path, Full(2))
    _offer(store, 1)
    _offer(store, 2)
    with pytest.raises(CheckpointError, match=r"step 2 .*No space left"):
        store.wait() if meet == "wait" else _offer(store, 3)
    store.wait()
    assert CheckpointStore(tmp_path).newest().step == store.pointer.step == 1


def test_error_ends_the_run(tmp_path, opened, configure, toy):
    trainer = opened(configure(epochs=3), tmp_path, toy())
    trainer.store._files = Full(8)
    reports = []
    with pytest.raises(CheckpointError, match="No space left"):
        reports += trainer.events()
    assert CheckpointStore(tmp_path).newest().epoch == 1


def test_error_met_by_close_does_not_keep_the_curve_open(tmp_path, opened, configure, toy):
    trainer = opened(configure(epochs=3), tmp_path, toy())
    trainer.store._files = Full(0)
    next(trainer.events())
    with pytest.raises(CheckpointError, match="No space left"):
        trainer.close()
    assert trainer._history._file.closed


def test_what_cannot_be_saved_is_an_error_too(tmp_path):
    store = _store(tmp_path, None)
    with pytest.raises(
        CheckpointError, match=r"step 1 failed .*earlier checkpoints are untouched"
    ):
        _offer(store, 1, lambda: {"x": _Unpicklable()}, final=True)


class _Unpicklable:
    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("not this one")


def test_rows_are_durable_before_the_generation_is_in_place(tmp_path):
    order = []

    class Noting(Files):
        def rename(self, source, target):
            order.append("rename")
            super().rename(source, target)

    _offer(_store(tmp_path, Noting()), 1, covered=lambda: order.append("rows"), final=True)
    assert order == ["rows", "rename"]


def test_snapshot_shares_nothing_but_what_the_state_shares():
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
    expected = parse_state(format_state(original))
    copied = snapshot(original)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), original["column"]]:
            tensor.fill_(9)
    found = parse_state(format_state(copied))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert found["column"].stride() == expected["column"].stride()
    assert type(found["parameter"]) is nn.Parameter
    assert found["model"]._metadata == expected["model"]._metadata
    weights = found["model"]
    assert weights["0.weight"].data_ptr() == weights["head.weight"].data_ptr()
