"""The number of device synchronisations of a step, counted without an accelerator.

Whatever would fetch a value from an accelerator is an operation on the CPU too: it is seen here
by what it is, not by what it costs. `tests/gpu` asks the CUDA driver the same.
"""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from trainable.evaluation import _fetched
from trainable.logged import add_value, means

# What cannot be known on the host before the device has computed it.
_FETCHING = ("_local_scalar_dense", "equal", "nonzero", "masked_select")
# What copies to the host without an operation of its own where the value is there already.
_COPYING = ("cpu", "numpy", "tolist", "__array__")


class _Operations(TorchDispatchMode):
    def __init__(self, waits):
        super().__init__()
        self._waits = waits

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in _FETCHING:
            self._waits.append(str(func))
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, waits):
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        # By its name only: a device object is where the tensors are, the host in these tests.
        given = (*args[1:], *(kwargs or {}).values())
        names = [value for value in given if isinstance(value, str)]
        if name in _COPYING or (name == "to" and "cpu" in names):
            self._waits.append(name)
        return func(*args, **(kwargs or {}))


def _waits_of(run):
    waits = []
    with _Calls(waits), _Operations(waits):
        run()
    return waits


@pytest.mark.parametrize(
    "fetch",
    [
        lambda value: value.item(),
        lambda value: value.tolist(),
        lambda value: value.cpu(),
        lambda value: value.to("cpu"),
        lambda value: torch.equal(value, value),
        lambda value: value.nonzero(),
    ],
)
def test_every_way_to_fetch_a_value_is_seen(fetch):
    assert len(_waits_of(lambda: fetch(torch.ones(())))) == 1


def _steps(opened, configure, toy, directory, *, on_device, **train):
    """Waits of each step of an epoch but the first, in which some things are made."""
    config = configure(accumulation=3, layer_norms_every=2, **train)
    trainer = opened(config, directory, toy())
    if on_device:
        trainer._step._reads_at_once = False  # as on an accelerator
    windows = trainer._train.windows(0)
    trainer._take_step(next(windows))
    return [_waits_of(lambda window=window: trainer._take_step(window)) for window in windows]


@pytest.mark.seeds("S14")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        {"clip": {"max_norm": 1.0}},
        {"clip": {"max_norm": None, "value": 0.01}},
        {"ema": {"decay": 0.9}},
        {"swa": {"start": 1, "every": "1 step"}},
    ],
    ids=str,
)
def test_step_needs_no_device_sync(tmp_path, opened, configure, toy, precision, options):
    options = {"precision": precision, **options}
    steps = _steps(opened, configure, toy, tmp_path, on_device=True, **options)
    assert steps == [[], [], []]


@pytest.mark.seeds("S14")
def test_fp16_step_syncs_only_for_the_scaler(tmp_path, opened, configure, toy):
    """Each micro-batch's loss and weight, the norm, and the scale before and after its update."""
    steps = _steps(opened, configure, toy, tmp_path, on_device=False, precision="fp16")
    # 43 samples in windows of 12: the last one has two micro-batches.
    assert [len(waits) for waits in steps] == [2 * count + 1 + 2 for count in (3, 3, 2)]


@pytest.mark.parametrize("weight", [None, 12, torch.tensor(12.0)])
@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_logging_over_an_epoch_needs_no_device_sync(weight, reduce):
    sums, value = {}, torch.ones((), dtype=torch.float64)
    for _ in range(2):
        assert _waits_of(lambda: add_value(sums, "x", value, weight, reduce)) == []
    assert _waits_of(lambda: means([sums, sums])) == ["tolist"]


def test_host_metrics_are_not_sent_to_the_device():
    found = {"loss": torch.ones(()), "f1": torch.ones(1), "auc": 0.5}
    assert _fetched(found, torch.device("meta")) == found


def test_metrics_of_a_report_are_fetched_together():
    found = {"loss": torch.ones(()), "f1": torch.ones(1), "auc": 0.5}
    assert _waits_of(lambda: _fetched(found, torch.device("cpu"))) == ["tolist"]
