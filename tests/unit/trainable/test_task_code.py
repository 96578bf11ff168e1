"""Exceptions of a task within our iteration are its errors: no epoch ends early in silence."""

# ruff: noqa: ARG001, PT012  what stands in for something keeps its signature; loops that raise

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from tests.unit.trainable.conftest import CPU, Toy, variant
from trainable.calls import HOOKS
from trainable.config import LoaderConfig
from trainable.data import LoaderSource, SplitReading, WindowPlan
from trainable.errors import TaskError
from trainable.task import Data
from trainable.user_code.task_code import task_code


class Own(BaseException):
    """An exception of a library's own that is no Exception."""


ENDS = [StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, SystemExit, Own]
METHODS = ["loss", "evaluate", "forward", "build_optimizer", *HOOKS]


class Raising(Dataset):
    """Raises at one index."""

    def __init__(self, error, samples=43, at=30):
        self.error, self.samples, self.at = error, samples, at

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        if index == self.at:
            raise self.error
        return torch.zeros(5), torch.tensor(0)


@pytest.mark.parametrize(
    ("error", "workers", "where"),
    [
        *((error, 0, "dataset") for error in ENDS),
        *((error, 1, "dataset") for error in (StopIteration, SystemExit, Own)),
        *((StopIteration, workers, "collate") for workers in (0, 1)),
    ],
)
def test_epoch_that_ends_early_is_a_task_error(error, workers, where):
    def collate(samples):
        if len(samples) < 12:
            raise error
        return default_collate(samples)

    at = 30 if where == "dataset" else None
    source = LoaderSource(
        Raising(error, at=at),
        WindowPlan(43, 12, 12, shuffle=False),
        SplitReading(
            "train",
            CPU,
            loader=LoaderConfig(num_workers=workers),
            collate=collate if where == "collate" else None,
        ),
    )
    came = 0
    with pytest.raises(TaskError) as raised:
        for _ in source.windows(1):
            came += 1
    source.close()
    expected = 2 if where == "dataset" else 3
    assert came == expected
    assert f"train: {expected} of 4 windows of epoch 2 came: {error.__name__}" in str(raised.value)
    assert "test_task_code.py:" in str(raised.value)
    assert "return each item that the length promises" in str(raised.value)


@pytest.mark.parametrize("split", ["train", "val"])
def test_dataset_that_ends_fails_the_run(split, tmp_path, opened, configure):
    whole = TensorDataset(torch.zeros(43, 5), torch.zeros(43, dtype=torch.long))
    data = Data(**({"train": whole, "val": whole} | {split: Raising(StopIteration)}))
    task = variant(build_data=lambda self: data)  # noqa: ARG005

    with pytest.raises(TaskError, match=rf"{split}: \d of 4 windows of epoch 1 came: StopIter"):
        list(opened(configure(), tmp_path, task).events())


def test_source_that_ends_early_is_detected(tmp_path, opened, configure):
    trainer = opened(configure(), tmp_path, Toy())
    whole = trainer._train.windows
    trainer._train.windows = lambda epoch, start: list(whole(epoch, start))[:3]
    with pytest.raises(TaskError, match="3 of 4 windows of epoch 1 came"):
        list(trainer.events())


@pytest.mark.parametrize(
    ("error", "method"),
    [*((error, "loss") for error in ENDS), *((SystemExit, method) for method in METHODS[1:])],
)
def test_stop_iteration_and_exit_are_task_errors(error, method, tmp_path, opened, configure):
    def fail(*_):
        raise error

    def build_model(self):
        model = Toy.build_model(self)
        model.register_forward_pre_hook(fail)
        return model

    methods = {"build_model": build_model} if method == "forward" else {method: fail}
    with pytest.raises(TaskError, match=rf"{error.__name__} was raised at .* in fail\(\)") as why:
        list(opened(configure(), tmp_path, variant(**methods)).events())
    assert isinstance(why.value.__cause__, error)
    ends_loop = issubclass(error, (StopIteration, StopAsyncIteration))
    assert ("give next() a default" if ends_loop else "remove the call") in str(why.value)
    assert "the length promises" not in str(why.value)  # no data item is at fault


def test_evaluating_some_batches_is_allowed(tmp_path, opened, configure):
    def evaluate(self, model, batches):
        return {"loss": self.loss(model, next(iter(batches)))[0]}

    trainer = opened(configure(), tmp_path, variant(evaluate=evaluate))
    assert len(list(trainer.events())) == 3


def _python_code():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10_000):
        pass


@pytest.mark.parametrize("handled_in", ["C", "Python"])
def test_keyboard_interrupt_is_no_task_error(handled_in):
    def handle(number, frame):
        raise KeyboardInterrupt

    handler = signal.default_int_handler if handled_in == "C" else handle
    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), task_code():
            _python_code()
    finally:
        signal.signal(signal.SIGINT, before)


def test_closing_a_run_between_reports_is_no_error(tmp_path, opened, configure):
    events = opened(configure(), tmp_path, Toy()).events()
    next(events)
    events.close()
