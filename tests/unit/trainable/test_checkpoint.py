"""The checkpoint store: complete or absent, whatever is interrupted or damaged."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import os
import random

import pytest
import torch

from tests.chaos.kill_cases import SEED
from tests.fake_checkpoints import save_if_due
from trainable.checkpoint import CheckpointStore, Pointer
from trainable.config import CheckpointConfig
from trainable.errors import AllCheckpointsDamaged, CheckpointError, WriterReplaced
from trainable.export import export_weights
from trainable.store.manifest import format_manifest


def _store(directory, *, every="1 epoch", keep=2, mode="min", files=None, clock=None):
    config = CheckpointConfig.model_validate({"every": every, "keep": keep})
    options = {"clock": clock} if clock else {}
    return CheckpointStore(directory, config, metric="val/loss", mode=mode, files=files, **options)


def _save(store, step, value=None, **options):
    """Offer a state and wait; return the pointer to it, None when nothing was saved."""
    saves = save_if_due(
        store,
        lambda: {"step": step, "weights": torch.arange(4.0) + step},
        step=step,
        epoch=step,
        value=value,
        **options,
    )
    store.wait()
    return store.pointer if saves else None


def _steps(store):
    return [generation.step for generation in store.generations()]


def test_layout_and_pointer(tmp_path):
    pointer = _save(_store(tmp_path), 120, 0.5)
    directory = tmp_path / "checkpoints" / "step-00000120"
    assert sorted(path.name for path in directory.iterdir()) == ["manifest.json", "state.pt"]
    digest = hashlib.sha256((directory / "state.pt").read_bytes()).hexdigest()
    assert pointer == Pointer(str(directory), 120, digest)
    manifest = json.loads((directory / "manifest.json").read_text())["manifest"]
    assert manifest["files"]["state.pt"]["sha256"] == digest
    assert (manifest["step"], manifest["epoch"], manifest["value"]) == (120, 120, 0.5)


@pytest.mark.seeds("S16")
def test_keeps_the_newest_and_the_best(tmp_path):
    store = _store(tmp_path, keep=2)
    for step, value in enumerate([5.0, 1.0, 4.0, 1.0, 3.0, 2.0], start=1):
        _save(store, step, value)
    assert _steps(store) == [2, 5, 6]  # of the two equals the earlier one
    assert store.best().step == 2
    assert store.newest().step == 6


def test_keeps_the_milestone_of_a_longer_run(tmp_path):
    store = _store(tmp_path, keep=2)
    store.milestone = 3
    for step, value in enumerate([5.0, 1.0, 4.0, 4.0, 3.0, 2.0], start=1):
        _save(store, step, value)
    assert _steps(store) == [2, 3, 5, 6]


def test_mode_max_and_values_that_are_no_numbers(tmp_path):
    store = _store(tmp_path, mode="max")
    for step, value in enumerate([1.0, 7.0, float("nan"), float("inf"), None], start=1):
        _save(store, step, value)
    assert store.best().step == 2
    assert [g.value for g in store.generations()] == [7.0, None, None]


def _flip(path, bit):
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def _damages(content, num_flips):
    """Contents with one flipped bit, cut at 64 lengths, and with each page zeroed."""
    chance = random.Random(SEED)
    for bit in chance.sample(range(8 * len(content)), num_flips):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} flipped", bytes(damaged)
    for cut in chance.sample(range(len(content)), 64):
        yield f"cut to {cut} bytes", content[:cut]
    for page in range(0, len(content), 4096):
        zeroed = content[page : page + 4096]
        yield f"page at {page} zeroed", content.replace(zeroed, bytes(len(zeroed)))


@pytest.mark.fault(13, "each kind of damage, thousands of times, straight at the store")
@pytest.mark.parametrize(("name", "num_flips"), [("state.pt", 1500), ("manifest.json", 500)])
def test_row_13_every_kind_of_damage_is_detected(tmp_path, name, num_flips):
    """Detected is: not loaded, and the one before it is used. Nothing is loaded that differs."""
    store = _store(tmp_path)
    for step in (1, 2):
        _save(store, step, 0.5)
    path = tmp_path / "checkpoints" / "step-00000002" / name
    content = path.read_bytes()
    assert len(content) < 4096 * 8
    for what, damaged in _damages(content, num_flips):
        path.write_bytes(damaged)
        newest = CheckpointStore(tmp_path).newest()
        assert newest.step == 1, f"{what} of CHAOS_SEED={SEED} was not detected"
    path.write_bytes(content[:-1])
    assert _steps(CheckpointStore(tmp_path)) == [1], "listed without a look at its digest"
    path.write_bytes(content)
    assert CheckpointStore(tmp_path).newest().step == 2


def test_damaged_newest_is_quarantined_and_previous_used(tmp_path):
    store = _store(tmp_path)
    for step in (1, 2):
        _save(store, step)
    _flip(tmp_path / "checkpoints" / "step-00000002" / "state.pt", 4000)
    reader = CheckpointStore(tmp_path)
    assert reader.newest().step == 1
    assert (tmp_path / "checkpoints" / "step-00000002").exists()  # a reader changes nothing
    again = _store(tmp_path)
    assert again.resume()["step"] == 1
    assert (tmp_path / "checkpoints" / "quarantine" / "step-00000002" / "state.pt").exists()
    (told,) = again.set_aside
    assert told.startswith("checkpoint step-00000002 is damaged and was set aside: ")
    assert told.endswith("; step-00000001 is used instead")
    _save(again, 2)
    assert again.newest().step == 2


def test_all_damaged_is_a_lasting_error_that_names_them(tmp_path):
    store = _store(tmp_path)
    for step in (1, 2):
        _save(store, step)
        _flip(tmp_path / "checkpoints" / f"step-0000000{step}" / "state.pt", 4000)
    for _ in range(2):
        with pytest.raises(
            AllCheckpointsDamaged, match=r"(?s)step-00000001.*sha256.*step-00000002"
        ):
            _store(tmp_path).resume()


def test_quarantine_alone_is_no_fresh_start(tmp_path):
    store = _store(tmp_path)
    _save(store, 1)
    quarantine = tmp_path / "checkpoints" / "quarantine"
    quarantine.mkdir()
    (tmp_path / "checkpoints" / "step-00000001").rename(quarantine / "step-00000001")
    with pytest.raises(AllCheckpointsDamaged):
        _store(tmp_path).resume()


def test_second_generation_of_a_step_destroys_nothing(tmp_path):
    store = _store(tmp_path)
    first, second = _save(store, 3), _save(store, 3, 0.5)
    assert (first.address[-13:], second.address[-15:]) == ("step-00000003", "step-00000003.1")
    assert store.newest().path.name == "step-00000003.1"


def test_newest_is_the_last_committed(tmp_path):
    store = _store(tmp_path, keep=2)
    for step in (400, 300, 200, 100):  # the run went back, as population-based training does
        _save(store, step)
    assert CheckpointStore(tmp_path).newest().step == 100
    assert _store(tmp_path).resume()["step"] == 100


def test_steps_beyond_eight_digits_sort_as_numbers(tmp_path):
    store = _store(tmp_path)
    _save(store, 99_999_999)
    _save(store, 100_000_000)
    assert CheckpointStore(tmp_path).newest().step == 100_000_000


@pytest.mark.seeds("S16")
@pytest.mark.parametrize(
    ("every", "saved"), [("2 steps", [2, 4, 6]), ("10 seconds", [3, 6]), ("1 epoch", [])]
)
def test_intervals_within_an_epoch(tmp_path, every, saved):
    now = [0.0]
    store = _store(tmp_path, every=every, keep=9, clock=lambda: now[0])
    for step in range(1, 7):
        now[0] += 4
        save_if_due(store, dict, step=step, epoch=0)
        store.wait()
    assert _steps(store) == saved


@pytest.mark.seeds("S16")
def test_step_that_is_saved_is_not_saved_again(tmp_path):
    def due(step):
        return store.is_due(step=step, epoch=None, report=None, certain=False)

    store = _store(tmp_path, every="2 steps", keep=9)
    assert [due(step) for step in (0, 1, 2, 4)] == [False, False, True, True]
    _save(store, 4)
    assert [due(step) for step in (2, 4, 6)] == [True, False, True]
    store.close()
    store = _store(tmp_path, every="2 steps", keep=9)
    store.resume()
    assert [due(step) for step in (2, 4, 6)] == [True, False, True]


@pytest.mark.seeds("S16")
def test_epoch_interval_counts_epoch_ends(tmp_path):
    store = _store(tmp_path, every="2 epochs", keep=9)
    for epoch in range(1, 8):
        for step, end_of_epoch in ((2 * epoch - 1, False), (2 * epoch, True)):
            save_if_due(
                store,
                dict,
                step=step,
                epoch=epoch if end_of_epoch else 0,
            )
            store.wait()
    assert [generation.epoch for generation in store.generations()] == [2, 4, 6]


@pytest.mark.seeds("S16")
def test_new_best_and_the_end_are_always_saved(tmp_path):
    store = _store(tmp_path, every="1000 steps", keep=9)
    assert _save(store, 1, 0.5) is None
    assert _save(store, 2, 0.4, new_best=True) is not None
    assert _save(store, 3, 0.6, final=True) is not None


def test_load_verifies_the_digest_and_refuses_objects(tmp_path):
    store = _store(tmp_path)
    pointer = _save(store, 1)
    assert store.load(pointer)["step"] == store.load(pointer.address)["step"] == 1
    _flip(tmp_path / "checkpoints" / "step-00000001" / "state.pt", 4000)
    with pytest.raises(CheckpointError, match="sha256"):
        store.load(pointer)
    store.save(lambda: {"x": WriterReplaced}, step=2, reports=2, final=True)
    with pytest.raises(CheckpointError, match="not plain data"):
        store.load(store.pointer)


class _Planted:
    """Unpickled, it makes a directory: what any code could do."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def _plant(generation, marker):
    """Replace a state by a pickle that runs code, with a manifest that vouches for it."""
    planted = io.BytesIO()
    torch.save({"model": {"weight": torch.ones(2)}, "planted": _Planted(marker)}, planted)
    _replace(generation, planted.getvalue())


def _replace(generation, content):
    """Replace a state by other bytes, with a manifest that vouches for them."""
    (generation.path / "state.pt").write_bytes(content)
    vouched = dataclasses.replace(
        generation, sha256=hashlib.sha256(content).hexdigest(), length=len(content)
    )
    (generation.path / "manifest.json").write_bytes(format_manifest(vouched))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_manifest_with_a_value_that_no_run_writes_is_damaged(tmp_path, value):
    _save(_store(tmp_path), 1, 0.5)
    path = tmp_path / "checkpoints" / "step-00000001" / "manifest.json"
    record = json.loads(path.read_text())
    record["manifest"]["value"] = value
    sealed = json.dumps(record["manifest"], sort_keys=True).encode()
    record["sha256"] = hashlib.sha256(sealed).hexdigest()
    path.write_text(f"{json.dumps(record, indent=1, sort_keys=True)}\n")
    assert CheckpointStore(tmp_path).generations() == []


def test_a_planted_pickle_runs_no_code(tmp_path):
    _save(_store(tmp_path), 1)
    marker = tmp_path / "marker"
    _plant(CheckpointStore(tmp_path).newest(), marker)
    planted = CheckpointStore(tmp_path).newest()
    with pytest.raises(CheckpointError, match="not plain data"):
        CheckpointStore(tmp_path).load(planted)
    with pytest.raises(CheckpointError, match="not plain data"):
        export_weights(planted.path, tmp_path / "model.safetensors")
    assert not marker.exists()
    assert not (tmp_path / "model.safetensors").exists()
    torch.load(planted.path / "state.pt", weights_only=False)  # where that is allowed, it does
    assert marker.exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"torch has not written this", b"PK\x03\x04" + bytes(60), b"\x80\x02}.", b"\x80\x02."],
    ids=["empty", "text", "half an archive", "another pickle", "half a pickle"],
)
def test_state_that_torch_cannot_read_is_named(tmp_path, content):
    _save(_store(tmp_path), 1)
    _replace(CheckpointStore(tmp_path).newest(), content)
    damaged = CheckpointStore(tmp_path).newest()
    with pytest.raises(CheckpointError, match=r"step-00000001/state\.pt"):
        CheckpointStore(tmp_path).load(damaged)
    with pytest.raises(CheckpointError, match=r"step-00000001"):
        export_weights(damaged.path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_digest_is_verified_before_parsing(tmp_path, monkeypatch):
    pointer = _save(_store(tmp_path), 1)
    _flip(tmp_path / "checkpoints" / "step-00000001" / "state.pt", 4000)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("parsed"))
    with pytest.raises(CheckpointError, match="sha256"):
        CheckpointStore(tmp_path).load(pointer)
