"""Loader processes are new in each epoch; data sets change, grow and shrink between epochs."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)

from tests.resumption import Crash, crash_at, curve, to_end
from trainable import Data, Task
from trainable.errors import CheckpointError, ConfigError, TaskError

SAMPLES = 24  # three windows of eight


class Rows(Dataset):
    """Samples with what the data set saw: `saw(index)`, of subclasses."""

    def __init__(self, samples=SAMPLES):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(400, 3, generator=generator)
        self.rows, self.epoch, self.count = list(range(samples)), 0, 0
        self.generator = numpy.random.default_rng(3)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return self.x[row], self.x[row].sum().gt(0).long(), torch.tensor(float(self.saw(row)))

    def saw(self, row):
        return row


class Epochs(Rows):
    def saw(self, _):
        return self.epoch


class Told(Epochs):
    def set_epoch(self, epoch):
        self.epoch = epoch


class Generator(Rows):
    def saw(self, _):
        return self.generator.random()


class Counting(Rows):
    """Counts its items, and draws now and then from torch's generator."""

    def saw(self, row):
        self.count += 1
        return self.count + (torch.rand(()).item() if row % 5 == 0 else 0)


class Seeds(Rows):
    def saw(self, _):
        return get_worker_info().seed % 1000 if get_worker_info() else 0


class Noisy:
    """A collate function with a generator and a counter of its own."""

    def __init__(self):
        self.random, self.calls = random.Random(3), 0

    def __call__(self, samples):
        self.calls += 1
        x, y, saw = default_collate(samples)
        return x, y, saw + self.random.random() + self.calls

    def method(self, samples):
        return self(samples)


def add_noise(samples, generator):
    x, y, saw = default_collate(samples)
    return x, y, saw + generator.random()


def nothing(*_):
    """Stands for a hook that is not given."""


class Learned(Task):
    """Trains on what the data set saw; the hooks are given.

    Args:
        rows: Makes the training data.
        hooks: Functions of the task and the number, by the name of the hook.
        data: Further parts of the data, made of the data set.
        val: Makes the validation data.
    """

    def __init__(self, rows, *, val=Rows, data=lambda _: {}, **hooks):
        self.made, self.val_made, self.more = rows, val, data
        self.hooks = hooks

    def build_model(self):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def build_data(self):
        self.rows, self.val_rows = self.made(), self.val_made()
        more = self.more(self.rows)
        return Data(more.pop("train", self.rows), self.val_rows, **more)

    def loss(self, model, batch):
        x, y, saw = batch
        self.log("saw", saw.mean())
        self.log("samples", len(y), over="epoch", reduce="sum")
        x = x * (1 + saw.float().unsqueeze(1) / 100)
        return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)

    def on_epoch_start(self, epoch):
        self.hooks.get("start", nothing)(self, epoch)

    def on_step_end(self, step):
        self.hooks.get("step", nothing)(self, step)

    def on_epoch_end(self, epoch):
        self.hooks.get("end", nothing)(self, epoch)


def set_epoch(task, epoch):
    task.rows.epoch = epoch


def grow(task, epoch):
    task.rows.rows += range(SAMPLES + 8 * epoch, SAMPLES + 8 * epoch + 8)


def shrink(task, _):
    del task.rows.rows[-7:]


def count_steps(task, step):
    task.rows.epoch = step


def weighted(rows):
    return {"sampler": WeightedRandomSampler(torch.ones(len(rows)), len(rows))}


class Batches:
    """Lists of five indices or fewer of the data set as it is now."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        order = torch.randperm(len(self.rows)).tolist()
        return iter([order[first : first + 5] for first in range(0, len(order), 5)])


CASES = {
    "epoch in a hook": (Epochs, {"start": set_epoch}),
    "set_epoch": (Told, {}),
    "changed within the epoch": (Epochs, {"start": set_epoch, "step": count_steps}),
    "counter": (Counting, {}),
    "grows": (Rows, {"end": grow}),
    "shrinks": (Rows, {"end": shrink}),
    "grows within the epoch": (Rows, {"step": grow}),
    "grows, with batches": (
        Rows,
        {"end": grow, "data": lambda rows: {"batch_sampler": Batches(rows)}},
    ),
    "generator": (Generator, {}),
    "seeds": (Seeds, {}),
    "collate": (Rows, {"data": lambda _: {"collate": Noisy()}}),
    "method as collate": (Rows, {"data": lambda _: {"collate": Noisy().method}}),
}
IN_PROCESSES = ("generator", "seeds", "collate", "method as collate")
"""State that only loader processes have: in the trial's process it would have to be saved."""


@pytest.mark.seeds("S15")
@pytest.mark.parametrize(
    ("case", "workers"),
    [
        (case, workers)
        for case in CASES
        for workers in (0, 2)
        if workers or case not in IN_PROCESSES
    ],
)
def test_killed_run_equals_a_whole_one(resumes_exactly, configure, case, workers):
    """Killed in the first, in a later epoch, and at its end; each save is within an epoch."""
    rows, more = CASES[case]
    config = configure(
        every="1 step",
        batch_size=8,
        loader={"num_workers": workers},
        schedule={"name": "constant"},
        budget={"epochs": 3, "report_every": 0.5},
    )
    _, resumed = resumes_exactly(config, lambda: Learned(rows, **more), 2, 5, 8)
    assert resumed.resumed_at == 7
    assert not multiprocessing.active_children()


def _seen(tmp_path, opened, configure, task, workers, name="saw", **train):
    """Return what the batches of each epoch, or the epochs, had seen."""
    options = {"schedule": {"name": "constant"}, "batch_size": 8, **train}
    directory = tmp_path / str(workers)
    run = opened(configure(loader={"num_workers": workers}, **options), directory, task)
    to_end(run)
    run.close()
    rows = curve(directory)
    return [row[name] for _, row in rows if name in row]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["hook", "set_epoch", "parts"])
def test_the_epoch_reaches_the_data_set(tmp_path, opened, configure, kind, workers):
    tasks = {
        "hook": Learned(Epochs, start=set_epoch),
        "set_epoch": Learned(Told),
        "parts": Learned(
            lambda: Told(SAMPLES // 2),
            data=lambda rows: {"train": Subset(ConcatDataset([rows, rows]), range(SAMPLES))},
        ),
    }
    assert (
        _seen(tmp_path, opened, configure, tasks[kind], workers)
        == [0.0] * 3 + [1.0] * 3 + [2.0] * 3
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_each_epoch_trains_the_samples_that_there_are(tmp_path, opened, configure, workers):
    for name, hook, expected in (
        ("grow", grow, [24.0, 32.0, 40.0]),
        ("shrink", shrink, [24.0, 17.0, 10.0]),
    ):
        task = Learned(Rows, end=hook)
        found = _seen(tmp_path / name, opened, configure, task, workers, "samples")
        assert found == expected


def test_validation_has_the_data_as_they_are(tmp_path, opened, configure):
    def change(task, epoch):
        task.val_rows.epoch = epoch + 5
        task.val_rows.rows.append(40 + epoch)

    for workers in (0, 2):
        task = Learned(Rows, val=Epochs, end=change)
        seen = _seen(tmp_path / "saw", opened, configure, task, workers, "val/saw")
        assert seen == [5.0, 6.0, 7.0]
        task = Learned(Rows, val=Epochs, end=change)
        counted = _seen(tmp_path / "n", opened, configure, task, workers, "val/samples")
        assert counted == [25.0, 26.0, 27.0]


def test_generators_of_loader_processes_draw_other_numbers_each_time(tmp_path, opened, configure):
    for make in (
        lambda: Learned(Generator),
        lambda: Learned(Rows, data=lambda _: {"collate": Noisy()}),
        lambda: Learned(
            Rows,
            data=lambda _: {"collate": functools.partial(add_noise, generator=random.Random(3))},
        ),
    ):
        directory = tmp_path / str(len(list(tmp_path.iterdir())))
        seen = _seen(directory, opened, configure, make(), 2)
        fractions = [round(value % 1, 9) for value in seen]
        assert len(set(fractions)) == len(fractions) == 9


def test_sampler_is_asked_after_the_hook(tmp_path, opened, configure):
    """Also for the first epoch, and for a data set that has grown."""

    class Sampled(Learned):
        def build_data(self):
            data = super().build_data()
            self.sampler = data.sampler
            return data

    def first_row_only(task, _):
        task.sampler.weights = torch.eye(len(task.rows))[-1].double()
        task.sampler.num_samples = len(task.rows)

    task = Sampled(Rows, data=weighted, start=first_row_only, end=grow)
    seen = _seen(tmp_path, opened, configure, task, 0)
    assert seen == [23.0] * 3 + [31.0] * 4 + [39.0] * 5


def test_tensors_are_read_as_they_are(tmp_path, opened, configure):
    """Of a `TensorDataset` that grows, and of a tuple whose values change in place."""
    x, y, saw = torch.randn(24, 3), torch.ones(24).long(), torch.zeros(24)

    def extend(task, _):
        more = [torch.cat([one, one[:8]]) for one in task.rows.tensors]
        task.rows.tensors = tuple(more)

    task = Learned(lambda: TensorDataset(x, y, saw), end=extend)
    assert _seen(tmp_path / "a", opened, configure, task, 0, "samples") == [24.0, 32.0, 40.0]

    def correct(task, _):
        task.rows[2].add_(1)

    task = Learned(lambda: (x, y, saw), end=correct)
    assert _seen(tmp_path / "b", opened, configure, task, 0) == [0.0] * 3 + [1.0] * 3 + [2.0] * 3


@pytest.mark.parametrize("name", ["cosine", "step", "tests.optimizers:two_levels"])
def test_growth_beyond_the_schedule_is_refused(tmp_path, opened, configure, name):
    arguments = {"arguments": {"low": 0.2}} if ":" in name else {}
    config = configure(batch_size=8, schedule={"name": name, **arguments})
    run = opened(config, tmp_path, Learned(Rows, end=grow))
    reports = run.events()
    next(reports)
    with pytest.raises(
        ConfigError, match=r"made for 9 steps, .* grown from 24 to 32 samples, and epoch 2 has 4 "
    ):
        next(reports)


def test_growth_within_a_budget_in_steps_needs_no_other_schedule(tmp_path, opened, configure):
    budget = {"steps": 10, "report_every": 5}
    config = configure(batch_size=8, budget=budget, loader={"num_workers": 2})
    run = opened(config, tmp_path, Learned(Rows, end=grow))
    assert [report.step for report in to_end(run)] == [5, 10]
    assert run.state.progress.epoch_samples == 40  # 3 + 4, and 3 of 5


def test_reports_within_an_epoch_follow_its_length(tmp_path, opened, configure):
    config = configure(
        batch_size=8,
        schedule={"name": "constant"},
        budget={"epochs": 3, "report_every": 0.5},
    )
    run = opened(config, tmp_path, Learned(Rows, end=grow))
    assert [report.step for report in to_end(run)] == [2, 3, 5, 7, 10, 12]


def test_data_set_without_samples_is_refused(tmp_path, opened, configure):
    run = opened(
        configure(batch_size=8),
        tmp_path,
        Learned(Rows, end=lambda task, _: task.rows.rows.clear()),
    )
    reports = run.events()
    next(reports)
    with pytest.raises(
        TaskError, match="train has no samples in epoch 2; an epoch needs at least"
    ):
        next(reports)


def test_resume_with_fewer_samples_is_refused(tmp_path, opened, configure):
    config = configure(every="1 step", batch_size=8)
    crashed = opened(config, tmp_path, Learned(Rows), should_stop=crash_at(3))
    with pytest.raises(Crash):
        to_end(crashed)
    crashed.close()
    resumed = opened(config, tmp_path, Learned(Rows))
    resumed.task.rows.rows.pop()
    with pytest.raises(CheckpointError, match="train has 23 samples, and had 24 when epoch 1"):
        to_end(resumed)


def test_persistent_processes_of_a_loader_are_refused(tmp_path, opened, configure):
    def loader():
        return DataLoader(Rows(), batch_size=8, num_workers=1, persistent_workers=True)

    with pytest.raises(TaskError, match="with persistent_workers=True; loader processes start"):
        opened(configure(), tmp_path, Learned(loader))


def test_the_replayed_windows_are_not_sent(tmp_path, opened, configure):
    """The loader processes fetch them, and the trial's process receives empty windows."""
    task = Learned(Counting)
    config = configure(every="1 step", batch_size=8, loader={"num_workers": 1})
    run = opened(config, tmp_path, task)
    source = run._train
    source.begin(0)
    whole = [float(batch[2].sum()) for window in source.windows(0) for batch in window]
    again = [float(batch[2].sum()) for window in source.windows(0, 2) for batch in window]
    assert again == whole[2:]


class Dropped:
    """Garbage that only a collection finds, and that says so."""

    found = False

    def __init__(self):
        self.itself = self

    def __del__(self):
        Dropped.found = True


class Collecting(Rows):
    def saw(self, _):
        gc.collect()
        return Dropped.found


def test_loader_process_collects_nothing_that_its_parent_had_dropped(
    tmp_path, opened, configure
) -> None:
    gc.disable()
    try:
        Dropped()
        assert set(_seen(tmp_path, opened, configure, Learned(Collecting), 1)) == {0.0}
    finally:
        gc.enable()
    gc.collect()
    assert Dropped.found, "there was garbage"
