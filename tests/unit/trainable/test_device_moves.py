"""Checkpoints between kinds of devices, and device generators, without such a device.

The same moves with a real GPU: `tests/gpu/test_training_gpu.py`.
"""

# ruff: noqa: ARG005  what stands in for something keeps its signature

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import torch

from trainable.build import open_trainer
from trainable.checkpoint import CheckpointStore
from trainable.errors import TaskError
from trainable.memory import CONTEXT_BYTES
from trainable.seeding import set_seed
from trainable.train_state import TrainState


def _half(configure, opened, toy, directory):
    trainer = opened(configure(epochs=2, every="2 steps"), directory, toy())
    next(trainer.events())
    trainer.close()


@pytest.mark.seeds("S18")
def test_checkpoint_of_a_gpu_resumes_on_the_cpu(tmp_path, opened, configure, toy):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: tests/gpu shows it with the real one")
    _half(configure, opened, toy, tmp_path / "straight")
    expected = opened(configure(epochs=2, every="2 steps"), tmp_path / "straight", toy())
    curve = [row.metrics["train/loss"] for r in expected.events() for row in r.rows]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")
        _half(configure, opened, toy, tmp_path / "moved")
    content = (CheckpointStore(tmp_path / "moved").newest().path / "state.pt").read_bytes()
    with pytest.raises(RuntimeError, match=r"on a CUDA device but torch.cuda.is_available\(\)"):
        torch.load(io.BytesIO(content), weights_only=True)

    resumed = opened(configure(epochs=2, every="2 steps"), tmp_path / "moved", toy())
    assert resumed.state.progress.step == 4
    assert [row.metrics["train/loss"] for r in resumed.events() for row in r.rows] == curve


@pytest.mark.seeds("S18")
def test_state_is_put_where_the_model_is(tmp_path, opened, configure, toy):
    """Loading copies into the model's own tensors: the device of the file decides nothing."""
    trainer = opened(configure(epochs=1), tmp_path, toy())
    list(trainer.events())
    saved = trainer.store.load(trainer.store.newest())
    before = [p.data_ptr() for p in trainer.model.parameters()]
    trainer.state.load_state_dict(saved)
    assert [p.data_ptr() for p in trainer.model.parameters()] == before


class Generators:
    """Stands for the generators of two CUDA devices."""

    def __init__(self, monkeypatch):
        self.states = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
        self.seeds = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(self.states))
        monkeypatch.setattr(torch.cuda, "set_rng_state_all", self._set)
        monkeypatch.setattr(torch.cuda, "manual_seed_all", self.seeds.append)

    def _set(self, states):
        self.states = list(states)


@pytest.mark.seeds("S15", "S20")
def test_generators_of_all_gpus_are_saved_and_restored(
    tmp_path, opened, configure, toy, monkeypatch
):
    state: TrainState = opened(configure(), tmp_path, toy()).state
    generators = Generators(monkeypatch)
    saved = state.state_dict()
    generators.states = [torch.zeros(1, dtype=torch.uint8)] * 2
    state.load_state_dict(saved)
    assert [int(s) for s in generators.states] == [1, 2]
    generators.states = generators.states[:1]  # a machine with another number of them
    state.load_state_dict(saved)
    assert [int(s) for s in generators.states] == [1]


@pytest.mark.seeds("S20")
def test_generators_of_gpus_are_seeded(monkeypatch):
    generators = Generators(monkeypatch)
    set_seed(5)
    assert generators.seeds == [5]


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_gpu_memory_is_capped_before_first_use(tmp_path, configure, toy, monkeypatch, device):
    class Capped(Exception):
        pass

    caps = []

    def cap(share, place):
        caps.append((share, str(place)))
        raise Capped

    monkeypatch.setattr(torch.cuda, "is_available", lambda: device != "cpu")
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", cap)
    gpu = SimpleNamespace(total_memory=16 * CONTEXT_BYTES)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda place: gpu)
    task, built = toy(), []
    monkeypatch.setattr(toy, "build_model", lambda self: built.append(self))
    with pytest.raises((Capped, TaskError)):
        open_trainer(configure(), tmp_path, device=device, task=task, memory_share=0.25)
    # a quarter of the GPU, of which a quarter is the context's
    assert caps == ([] if device == "cpu" else [(0.25 * 0.75, "cuda:0")])
    assert built == ([task] if device == "cpu" else [])
