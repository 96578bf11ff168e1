"""BatchNorm in a trial of several ranks: what is said, refused and synchronized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trainable.batch_norm import (
    batch_norm_cautions,
    check_passes,
    remedy_for_passes,
    synchronize_batch_norm,
)
from trainable.config import TrainConfig, TrialConfig
from trainable.data import SampledPlan, WindowPlan
from trainable.errors import ConfigError
from trainable.streams import StreamPlan

GPU, CPU = torch.device("cuda"), torch.device("cpu")
SYNC = TrainConfig(batch_size=12, sync_batch_norm=True)


def _model():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("workers", "train", "parts"),
    [
        (1, {}, []),
        (1, {"accumulation": 2}, ["micro-batches of 6"]),
        (1, {"sync_batch_norm": True}, ["one process"]),
        (3, {}, ["3 ranks", "the 4 samples of one rank", "the 12 of all"]),
        (3, {"sync_batch_norm": True}, []),
    ],
)
def test_batch_norm_with_ranks_is_cautioned(workers, train, parts):
    trial = TrialConfig.model_validate(
        {
            "task": {"name": "toy"},
            "metric": "val/loss",
            "mode": "min",
            "workers": workers,
            "train": {"batch_size": 12, **train},
        }
    )
    said = list(batch_norm_cautions(_model(), trial))
    assert len(said) == bool(parts)
    assert all(part in said[0] for part in parts)
    without = [one for one in batch_norm_cautions(nn.Linear(2, 2), trial) if "BatchNorm (" in one]
    assert without == []


def test_batch_norm_is_synchronized_in_place():
    model = _model()
    kept, names = model[1], list(model.state_dict())
    synchronize_batch_norm(model, SYNC, device=GPU, size=1)
    assert type(kept) is nn.BatchNorm2d
    synchronize_batch_norm(model, SYNC, device=GPU, size=2)
    assert model[1] is kept
    assert [type(model[at]) for at in (1, 3)] == [nn.SyncBatchNorm] * 2
    assert list(model.state_dict()) == names
    assert torch.equal(model.eval()(torch.ones(2, 1, 3, 3)), _same(model)(torch.ones(2, 1, 3, 3)))


def _same(model):
    plain = _model().eval()
    plain.load_state_dict(model.state_dict())
    return plain


@pytest.mark.parametrize(
    ("device", "model", "text"),
    [(CPU, _model(), "between GPUs only"), (GPU, nn.Linear(2, 2), "no BatchNorm1d")],
)
def test_what_cannot_be_synchronized_is_refused(device, model, text):
    with pytest.raises(ConfigError, match=text) as refused:
        synchronize_batch_norm(model, SYNC, device=device, size=2)
    assert refused.value.key == "train.sync_batch_norm"


def _sampled(*, in_batches):
    given = [[0, 1], [2]] if in_batches else range(24)
    return SampledPlan(
        given, TrainConfig(batch_size=12), in_batches=in_batches, num_indices=24, seed=0
    )


DROP = {"loader": {"drop_last": True}}


@pytest.mark.parametrize(
    ("plan", "train", "fits"),
    [
        (WindowPlan(24, 12, 12), {}, True),
        (WindowPlan(28, 12, 12), {}, True),
        (WindowPlan(26, 12, 12), {}, False),
        (WindowPlan(26, 12, 12, drop_last=True), DROP, True),
        (WindowPlan(24, 8, 2), {"batch_size": 8, "accumulation": 4}, False),
        (WindowPlan(24, 12, 3), {"accumulation": 4}, True),
        (_sampled(in_batches=False), {}, False),
        (_sampled(in_batches=False), DROP, True),
        (_sampled(in_batches=True), DROP, False),
        (StreamPlan(0, 12, False, 0), DROP, True),
        (StreamPlan(0, 12, False, 0), {}, False),
        (StreamPlan(0, 1, True, 0), {**DROP, "accumulation": 3}, True),
        (StreamPlan(0, 1, True, 0), {**DROP, "accumulation": 4}, False),
    ],
)
def test_ranks_make_as_many_forward_passes(plan, train, fits):
    config = TrainConfig(**{"batch_size": 12, **train}, sync_batch_norm=True)
    assert remedy_for_passes(config, plan, 1) == ""
    remedy = remedy_for_passes(config, plan, 3)
    assert (remedy == "") == fits
    check_passes(config.model_copy(update={"sync_batch_norm": False}), remedy)
    if fits:
        check_passes(config, remedy)
        return
    with pytest.raises(ConfigError, match=remedy) as refused:
        check_passes(config, remedy)
    assert refused.value.key == "train.sync_batch_norm"
