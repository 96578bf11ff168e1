"""A configuration records which of its keys are read."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from trainable.config import OptimizerConfig, TrialConfig
from trainable.loop_context import record_reads

PLAIN = TrialConfig.model_validate(
    {
        "task": {"name": "m:f", "width": 3, "nested": {"depth": 2}},
        "metric": "val/loss",
        "mode": "min",
        "train": {"optimizer": {"lr": 0.05}},
    }
)


def _keys(read):
    config, reads = record_reads(PLAIN)
    read(config)
    return reads


@pytest.mark.parametrize(
    ("read", "key"),
    [
        (lambda c: c.train.optimizer.lr, "train.optimizer.lr"),
        (lambda c: c.train.micro_batch_size, "train.batch_size"),
        (lambda c: c.task.width, "task.width"),
        (lambda c: c.task.nested["depth"], "task.nested.depth"),
        (lambda c: c.task.arguments["width"], "task.width"),
        (lambda c: c.task.arguments.pop("width"), "task.width"),
        (lambda c: c.metrics, "metric"),
    ],
)
def test_one_key_that_is_read_is_noted_alone(read, key):
    reads = _keys(read)
    assert reads.has(key)
    assert not reads.has("train.clip.max_norm")
    assert not reads.has("budget.epochs")


@pytest.mark.parametrize(
    "read",
    [
        lambda c: c.model_dump(),
        lambda c: vars(c),
        lambda c: dict(c),
        lambda c: copy.deepcopy(c),
        lambda c: pickle.dumps(c),
        lambda c: c == PLAIN,
    ],
)
def test_taking_everything_reads_everything(read):
    reads = _keys(read)
    assert reads.has("train.optimizer.lr")
    assert reads.has("task.width")


@pytest.mark.parametrize(
    "read",
    [
        lambda c: {**c.task.arguments},
        lambda c: dict(c.task.arguments),
        lambda c: list(c.task.arguments.items()),
        lambda c: json.dumps(c.task.arguments),
        lambda c: c.task.arguments | {},
        lambda c: pickle.loads(pickle.dumps(c.task.arguments)),
        lambda c: dict(c.task),
        lambda c: c.task.model_dump(),
    ],
)
def test_taking_a_section_reads_that_section(read):
    reads = _keys(read)
    assert reads.has("task.width")
    assert reads.has("task.nested")
    assert not reads.has("train.optimizer.lr")


@pytest.mark.parametrize("read", [repr, str, lambda c: f"{c} {c!r}", lambda c: c.train])
def test_printing_or_passing_a_section_reads_nothing(read):
    assert not _keys(read).keys


def test_recording_config_behaves_like_the_plain_one():
    config, _ = record_reads(PLAIN)
    assert isinstance(config, TrialConfig)
    assert isinstance(config.train.optimizer, OptimizerConfig)
    assert config == config.model_copy() == pickle.loads(pickle.dumps(config)) == PLAIN
    assert repr(config) == repr(PLAIN)
    assert hash(config.train) == hash(PLAIN.train)
    assert type(copy.deepcopy(config)) is TrialConfig
    with pytest.raises(AttributeError):
        _ = config.train.nothing
    with pytest.raises(ValueError, match="frozen"):
        config.train.optimizer.lr = 1.0


def test_missing_key_that_is_requested_is_noted():
    reads = _keys(lambda c: (getattr(c.task, "depth", 1), c.task.arguments.get("heads", 1)))
    assert reads.missing == {"task.depth", "task.heads"}
