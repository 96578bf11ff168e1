"""What a run would lose when it resumes is refused before a sweep, and what it restores is not."""

from __future__ import annotations

import collections
import functools
import random
import time

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.unit.trainable import holders_task
from tests.unit.trainable.conftest import Toy
from tests.unit.trainable.holders_task import Counter, Holding
from trainable.check.rehearsal import rehearse
from trainable.errors import ConfigError, TaskError
from trainable.task import Data

pytestmark = pytest.mark.usefixtures("patient")


class HalfPickled(Counter):
    """Forgets what it counted last."""

    __slots__ = ()

    def __getstate__(self):
        return {"calls": self.calls}

    def __setstate__(self, state):
        self.calls, self.recent = state["calls"], collections.deque(maxlen=3)


class HalfSaved(Counter):
    """The same, by torch's words."""

    __slots__ = ()

    def state_dict(self):
        """Return the calls alone."""
        return {"calls": self.calls}

    def load_state_dict(self, state):
        """Take the calls."""
        self.calls = state["calls"]
        self.recent.clear()


class Refilled(Counter):
    """Draws again when it is restored."""

    __slots__ = ()

    def __getstate__(self):
        return self.calls

    def __setstate__(self, state):
        self.calls, self.recent = state + 1, collections.deque([state], maxlen=3)


class Unready(HalfSaved):
    """Cannot load what it has saved."""

    __slots__ = ()

    def load_state_dict(self, state):
        """Fail."""
        raise KeyError(state["calls"])


PLACES = ("data", "collate", "optimizer", "module", "global", "class", "closure")
LOST = [
    *(("task", kind, kind.__name__) for kind in (HalfPickled, HalfSaved, Refilled)),
    ("task", Unready, "KeyError"),
    *((place, HalfSaved, "HalfSaved") for place in PLACES),
]


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch):
    monkeypatch.setattr("trainable.check.rehearsal.SECONDS", 120.0)


@pytest.mark.parametrize(("place", "kind", "said"), LOST)
def test_what_a_resumed_run_would_lose_is_refused(configure, monkeypatch, place, kind, said):
    monkeypatch.setitem(holders_task.MADE, "lost", kind)
    found = rehearse(configure(), functools.partial(Holding, place, "lost"))
    assert isinstance(found.problem, TaskError | ConfigError), found
    assert said in str(found.problem)
    assert "\n" not in str(found.problem)


class Forgetful(Toy):
    """Declares a state that lacks its counter."""

    calls = 0

    def loss(self, model, batch):
        """Weigh by the calls so far."""
        self.calls += model.training
        total, weight = super().loss(model, batch)
        return total * (1 + self.calls), weight

    def state_dict(self):
        """Return nothing."""
        return {}

    def load_state_dict(self, state):
        """Take nothing."""


class InFile(Toy):
    """Counts in a file, which no checkpoint has."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def loss(self, model, batch):
        """Weigh by the calls so far."""
        total, weight = super().loss(model, batch)
        if not model.training:
            return total, weight
        with open(self.file, "a") as opened:
            opened.write("a")
        return total * self.file.stat().st_size, weight


class Timed(Toy):
    """Draws by a seed that nobody knows."""

    def loss(self, model, batch):
        """Add noise."""
        total, weight = super().loss(model, batch)
        return total * (1 + random.Random(time.perf_counter_ns()).random()), weight


class Clocked(Toy):
    """Logs what a clock says."""

    def loss(self, model, batch):
        """Log the time, and keep it."""
        self.now = time.perf_counter()
        self.log("seconds", self.now % 1)
        return super().loss(model, batch)


def test_what_a_task_forgets_or_writes_elsewhere_is_refused(configure, tmp_path):
    assert "Forgetful.state_dict()" in str(rehearse(configure(), Forgetful).problem)
    outside = rehearse(configure(), functools.partial(InFile, tmp_path / "calls"))
    assert "writes to a file" in outside.caution


def test_random_steps_are_a_caution_and_clocks_are_none(configure):
    found = rehearse(configure(), Timed)
    assert found.problem is None
    assert "the same each time" in found.caution
    found = rehearse(configure(), Clocked)
    assert (found.problem, found.caution) == (None, None)


class Stream(IterableDataset):
    """Draws its samples from a generator of its own."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(60):
            x = torch.randn(5, generator=generator)
            yield x, (x.sum() > 0).long()

    def __len__(self):
        return 60


class Unusual(Toy):
    """Keeps state in many places, and all of it can be restored."""

    def __init__(self, stream=False):
        super().__init__()
        self.stream, self.best, self.rng = stream, [], random.Random(3)

    def build_data(self):
        """Return a stream, or samples chosen by a sampler that counts."""
        data = super().build_data()
        if self.stream:
            return Data(train=Stream(), val=data.val)
        train = torch.utils.data.TensorDataset(*data.train)
        sampler = holders_task.Sampler(holders_task.Holder("number"))
        return Data(train=train, val=data.val, sampler=sampler)

    def build_model(self):
        """Return a model with its average."""
        model = super().build_model()
        self.average = torch.optim.swa_utils.AveragedModel(model)
        return model

    def build_optimizer(self, model, config):
        """Return the wrapper, and plan with a schedule of torch's."""
        holder = holders_task.Holder("tensor")
        optimizer = holders_task.Lookahead(model.parameters(), holder, lr=config.optimizer.lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
            torch.optim.SGD(model.parameters(), lr=1.0), patience=0
        )
        return optimizer

    def loss(self, model, batch):
        """Draw from the task's own generator."""
        total, weight = super().loss(model, batch)
        if model.training:
            total = total * (1 + 0.1 * self.rng.random())
        return total, weight

    def on_step_end(self, step):
        """Average the weights."""
        del step
        self.average.update_parameters(self.average.module)

    def on_epoch_end(self, epoch):
        """Let the plateau see a value."""
        self.best.append(float(epoch))
        self.plateau.step(float(epoch))


@pytest.mark.parametrize(
    ("stream", "train"),
    [(False, {"ema": {"decay": 0.9}}), (True, {}), (True, {"schedule": {"name": "plateau"}})],
    ids=str,
)
def test_unusual_task_that_resumes_exactly_passes_silently(configure, stream, train):
    found = rehearse(configure(**train), functools.partial(Unusual, stream=stream))
    assert (found.problem, found.caution) == (None, None)
    assert found.builds_own  # it was rehearsed


def test_task_that_blocks_or_ends_its_process_is_left_to_the_first_batches(configure, monkeypatch):
    def blocks(self, model, batch):
        del self, model, batch
        time.sleep(600)

    def ends(self, model, batch):
        raise SystemExit((self, model, batch))

    monkeypatch.setattr("trainable.check.rehearsal.SECONDS", 2.0)
    for loss in (blocks, ends):
        found = rehearse(configure(), type("Stuck", (Toy,), {"loss": loss}))
        assert (found.problem, found.optimizer_bytes) == (None, None)
