"""The options of a DataLoader, and data transfer without waiting."""

from __future__ import annotations

import pytest
import torch

from trainable.config import LoaderConfig
from trainable.data import LoaderSource, SplitReading, WindowPlan, move

pytestmark = pytest.mark.seeds("S19")
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def _loader(device=CPU, **options):
    source = LoaderSource(
        list(range(10)),
        WindowPlan(10, 4, 4),
        SplitReading("train", device, loader=LoaderConfig(**options)),
    )
    return source._loader


def test_options_reach_the_loader():
    loader = _loader(num_workers=1, prefetch_factor=5)
    assert (loader.num_workers, loader.prefetch_factor) == (1, 5)


def test_processes_start_anew_in_each_epoch_and_prefetch_two():
    loader = _loader(num_workers=1)
    assert (loader.persistent_workers, loader.prefetch_factor) == (False, 2)


def test_persistent_processes_are_refused():
    with pytest.raises(ValueError, match="true, and there are 2 loader processes; they"):
        LoaderConfig(num_workers=2, persistent_workers=True)
    assert "persistent_workers" not in LoaderConfig(num_workers=2).model_dump()
    assert LoaderConfig(persistent_workers=True).num_workers == 0  # as in earlier versions


def test_worker_options_are_omitted_without_workers():
    loader = _loader(prefetch_factor=5)
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (
        0,
        False,
        None,
    )


@pytest.mark.parametrize(
    ("device", "asked", "pinned"),
    [
        (GPU, None, True),
        (GPU, True, True),
        (GPU, False, False),
        (CPU, None, False),
        (CPU, True, False),
    ],
)
def test_memory_is_pinned_for_a_gpu_alone(device, asked, pinned):
    assert _loader(device, pin_memory=asked).pin_memory is pinned


class Moving(torch.Tensor):
    """Writes down how it was asked to move."""

    def to(self, *arguments, **options):
        self.asked = (arguments, options)
        return self


def test_transfers_do_not_wait():
    tensor = torch.ones(2).as_subclass(Moving)
    move({"x": [tensor]}, GPU)
    assert tensor.asked == ((GPU,), {"non_blocking": True})
