"""Streams and samplers: what is trained, resumed and refused."""

from __future__ import annotations

import itertools
import multiprocessing
import sys

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.chaos.sampled_data import ShuffledStream, sampled
from tests.resumption import Crash, crash_at, equal, to_end
from tests.unit.trainable.conftest import Noisy, Toy
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.config import TrialConfig
from trainable.errors import CheckpointError, ConfigError, TrainingError
from trainable.task import Data

pytestmark = pytest.mark.filterwarnings("ignore:a resumed run reads the stream train again")


class Sampled(Toy):
    """The toy task with augmentation, whose data come in one of several ways."""

    def __init__(self, kind, **options):
        super().__init__(augmented=True, **options)
        self.kind = kind

    def build_data(self):
        plain = super().build_data()
        return sampled(self.kind, plain.train, TensorDataset(*plain.val))


KINDS = [
    *itertools.product(["weighted", "ragged", "stream", "skipped"], [0]),
    ("weighted", 2),
    ("ragged", 2),
    ("stream", 3),
    ("skipped", 2),
]


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize(("kind", "workers"), KINDS)
def test_crashed_run_resumes_exactly(resumes_exactly, configure, kind, workers):
    """At each of several places; samplers also as without loader processes."""
    config = configure(every="1 step", loader={"num_workers": workers})
    alone = configure(every="1 step") if kind in ("weighted", "ragged") else config
    kills = (3, 5) if workers else (1, 4, 5, 7)
    _, resumed = resumes_exactly(config, lambda: Sampled(kind), *kills, undisturbed=alone)
    assert resumed.resumed_at > 0
    assert not multiprocessing.active_children()


def _untold(stream):
    raise TypeError(f"{stream} has no length")


class Endless(Sampled):
    """Its training stream does not tell its length."""

    def build_data(self):
        data = super().build_data()
        kind = type("Untold", (type(data.train),), {"__len__": _untold})
        data.train.__class__ = kind
        return data


@pytest.mark.parametrize(("kind", "workers"), [("stream", 0), ("skipped", 2)])
def test_stream_of_unknown_length_resumes_exactly(resumes_exactly, configure, kind, workers):
    """Reports fall within passes over the stream, and passes end between reports."""
    config = configure(
        every="1 step",
        budget={"steps": 11, "report_every": 3},
        loader={"num_workers": workers},
    )
    whole, _ = resumes_exactly(config, lambda: Endless(kind), 4, 6)
    assert whole.state.progress.reports == 4


def _config(tmp_path, monkeypatch, configure, source, *, sweep=None, **train):
    (tmp_path / "streams_task.py").write_text(HEAD + source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "streams_task", raising=False)
    changes = {"task": {"name": "streams_task:It"}, **(sweep or {})}
    return TrialConfig.model_validate(configure(**train).model_dump() | changes)


HEAD = """
import random, torch
from torch.utils.data import (BatchSampler, DataLoader, DistributedSampler, IterableDataset,
                              RandomSampler, SequentialSampler, TensorDataset)
from trainable import Data, Task

plain = TensorDataset(torch.arange(200.0).view(40, 5).sin(), torch.zeros(40, dtype=torch.long))


class Base(Task):
    def build_model(self):
        return torch.nn.Linear(5, 3)


class Stream(IterableDataset):
    def __iter__(self):
        return (plain[index] for index in range(40))

    def __len__(self):
        return 40
"""
LATE = """
class Late(Stream):
    at = 0

    def __iter__(self):
        while self.at < 40:
            yield plain[self.at]
            self.at += 1  # after the yield: one sample too late

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class It(Base):
    def build_data(self):
        return Data(Late(), plain)
"""
OWN = """
class Own(Stream):
    def __iter__(self):
        order = list(range(40))
        random.Random(id(object())).shuffle(order)
        self.calls = getattr(self, "calls", 0) + 1
        return (plain[(index + self.calls) % 40] for index in order)


class It(Base):
    def build_data(self):
        return Data(Own(), plain)
"""
COUNTING = """
class Counting(RandomSampler):
    calls = 0

    def __iter__(self):
        self.calls += 1
        return iter(range(self.calls % 7, 40))


class It(Base):
    def build_data(self):
        return Data(plain, plain, sampler=Counting(plain))
"""
DATA = """
class It(Base):
    def build_data(self):
        return Data({})
"""


@pytest.mark.parametrize(
    ("source", "train", "message"),
    [
        (LATE, {}, "Late continues with other samples after load_state_dict.*resume: skip"),
        (OWN, {}, "Own gives other samples when an epoch is read again"),
        (COUNTING, {}, "Counting chooses other samples when it is asked again"),
        (
            DATA.format("plain, plain, sampler=range(41)"),
            {},
            "indices from 0 to 40, and train has 40 samples",
        ),
        (
            DATA.format("plain, plain, sampler=BatchSampler(SequentialSampler(plain), 4, False)"),
            {},
            "a sampler gives indices; correct it, or give it as batch_sampler=",
        ),
        (
            DATA.format("plain, plain, sampler=[1], batch_sampler=[[1]]"),
            {},
            "sampler and batch_sampler are both given",
        ),
        (
            DATA.format("Stream(), plain, sampler=[1]"),
            {},
            "sampler is given and train is a stream",
        ),
        (
            DATA.format("plain, plain, sampler=DistributedSampler(plain, 2, 0)"),
            {},
            "DistributedSampler for 2 processes; a run shuffles the samples itself",
        ),
        (
            DATA.format("Stream(), plain"),
            {"loader": {"resume": "exact"}},
            "a stream of type Stream without state_dict",
        ),
    ],
)
def test_data_that_cannot_resume_exactly_are_refused(
    tmp_path, monkeypatch, configure, source, train, message
):
    config = _config(tmp_path, monkeypatch, configure, source, **train)
    with pytest.raises(TrainingError, match=message):
        inspect_task(CheckRequest(config=config))


@pytest.mark.parametrize(
    "source",
    [
        "plain, plain, batch_sampler=BatchSampler(RandomSampler(plain), 5, False)",
        "DataLoader(plain, 5), plain",
    ],
)
def test_searched_batch_size_without_effect_is_refused(tmp_path, monkeypatch, configure, source):
    config = _config(tmp_path, monkeypatch, configure, DATA.format(source))
    other = config.model_copy(update={"train": configure(batch_size=24).train})
    with pytest.raises(ConfigError, match=r"is searched, and .* all trials would train alike"):
        inspect_task(CheckRequest(config=config, longest_warmup=other))
    assert inspect_task(CheckRequest(config=config)).steps_per_epoch == 8


@pytest.mark.parametrize("budget", [{"epochs": 2}, {"samples": 80, "report_every": 40}])
def test_unknown_length_needs_a_budget_in_steps(tmp_path, monkeypatch, configure, budget):
    source = "    __len__ = None\n" + DATA.format("DataLoader(Stream(), 5), plain")
    config = _config(tmp_path, monkeypatch, configure, source, sweep={"budget": budget})
    with pytest.raises(ConfigError, match=r"budget: \{steps: 20000, report_every: 500\}"):
        inspect_task(CheckRequest(config=config))
    steps = {"budget": {"steps": 6, "report_every": 3}}
    config = _config(tmp_path, monkeypatch, configure, source, sweep=steps)
    assert inspect_task(CheckRequest(config=config)).total_steps == 6


@pytest.mark.parametrize(
    ("train", "another"),
    [({"schedule": {"name": "step"}}, 2), ({"swa": {"start": 0.5}}, 1)],
)
def test_unknown_length_has_no_epochs_to_count(tmp_path, monkeypatch, configure, train, another):
    """In the first trial, and in another one of the sweep."""
    source = "    __len__ = None\n" + DATA.format("DataLoader(Stream(), 5), plain")
    steps = {"budget": {"steps": 6, "report_every": 3}}
    plain, counting = (
        _config(tmp_path, monkeypatch, configure, source, sweep=steps, **one)
        for one in ({}, train)
    )
    for first, *others in ([counting], [*[plain] * another, counting]):
        longest, *variants = *others, first
        request = CheckRequest(config=first, longest_warmup=longest, variants=tuple(variants))
        with pytest.raises(ConfigError, match="does not tell its length"):
            inspect_task(request)


def test_second_save_of_a_place_is_the_first(tmp_path, opened, configure):
    """Although the first one has read a sample ahead."""
    trainer = opened(configure(), tmp_path, Sampled("stream"), should_stop=lambda: True)
    to_end(trainer)
    saved = trainer.store.load(trainer.store.newest())
    assert equal(saved["position"], trainer.state.state_dict()["position"])


def test_other_number_of_stream_readers_is_refused(tmp_path, opened, configure):
    config = configure(every="1 step")
    crashed = opened(config, tmp_path, Sampled("stream"), should_stop=crash_at(2))
    with pytest.raises(Crash):
        to_end(crashed)
    with pytest.raises(CheckpointError, match="read by 0 loader processes and now there are 2"):
        opened(configure(loader={"num_workers": 2}), tmp_path, Sampled("stream"))


def test_batches_of_a_loader_are_micro_batches(tmp_path, opened, configure):
    """Whatever its batch size: `accumulation` of them make a step."""
    steps = []

    class Loaded(Toy):
        def build_data(self):
            data = super().build_data()
            train = DataLoader(TensorDataset(*data.train), 10, shuffle=True)
            return Data(train, DataLoader(TensorDataset(*data.val), 10))

        def loss(self, model, batch):
            if model.training:
                steps[-1].append(len(batch[0]))
            return super().loss(model, batch)

    trainer = opened(configure(epochs=1, accumulation=2), tmp_path, Loaded())
    trainer._step.optimizer.register_step_post_hook(lambda *_: steps.append([]))
    steps.append([])
    to_end(trainer)
    assert steps == [[10, 10], [10, 10], [3], []]
    assert trainer.state.progress.samples == 43


def test_epoch_without_a_step_is_refused(tmp_path, opened, configure):
    """A later one, too: the run would begin epochs for ever."""

    class Fading(Toy):
        def build_data(self):
            self.chosen = list(range(12))
            return Data(*(super().build_data().val,) * 2, sampler=self.chosen)

        def on_epoch_end(self, epoch):
            assert epoch == 0
            self.chosen.pop()

    trainer = opened(configure(loader={"drop_last": True}), tmp_path, Fading())
    with pytest.raises(ConfigError, match="12 and the sampler chooses 11 samples"):
        to_end(trainer)


def test_same_sample_is_augmented_anew_each_time(tmp_path, opened, configure):
    seen = []

    class Twice(Toy):
        def build_data(self):
            return Data(Noisy(5), TensorDataset(*super().build_data().val), sampler=[1] * 12)

        def loss(self, model, batch):
            if model.training:
                seen.append(batch[0])
            return super().loss(model, batch)

    to_end(opened(configure(epochs=1), tmp_path, Twice()))
    assert len(seen[0].unique(dim=0)) == 12


def test_each_evaluation_reads_the_same_samples(tmp_path, opened, configure):
    """From the start of the stream, although `val_batches` ends it early."""
    seen = []

    class Partly(Sampled):
        def evaluate(self, model, batches):
            found = list(batches)
            seen.append(torch.cat([batch[0] for batch in found]))
            return super().evaluate(model, found)

        def build_data(self):
            data = super().build_data()
            return Data(data.train, ShuffledStream(Noisy(43)))

    config = configure().model_dump() | {"budget": {"epochs": 3, "val_batches": 2}}
    trainer = opened(TrialConfig.model_validate(config), tmp_path, Partly("stream"))
    to_end(trainer)
    assert (trainer.plans[1].windows, trainer.plans[1].samples) == (2, 24)
    assert len(seen) == 3
    assert len(seen[0]) == 24
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


class RandomChunks(IterableDataset):
    """Chunks drawn at random, as language models are trained on."""

    def __iter__(self):
        while True:
            x = torch.randn(5)
            yield x, int(x[0] > 0)


class DrawnChunks(RandomChunks):
    """The same; its state is that of the global generators."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(("batches", "warns"), [(None, True), (3, False)])
def test_val_stream_of_unknown_length_warns(tmp_path, opened, configure, recwarn, batches, warns):
    class Lines(Toy):
        def build_data(self):
            return Data(super().build_data().train, RandomChunks())

    opened(configure(budget={"epochs": 1, "val_batches": batches}), tmp_path, Lines())
    assert ["never ends" in str(one.message) for one in recwarn] == [True] * warns


def test_stream_with_empty_state_resumes_exactly(resumes_exactly, configure):
    """It continues where it was, and drops nothing."""

    class Chunks(Toy):
        def build_data(self):
            return Data(DrawnChunks(), super().build_data().val)

    resumes_exactly(configure(budget={"steps": 6, "report_every": 3}, every="1 step"), Chunks, 5)
