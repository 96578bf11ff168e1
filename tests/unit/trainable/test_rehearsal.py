"""What a run would lose when it resumes is refused before a sweep, and what it restores is not."""

from __future__ import annotations

import collections
import functools
import random
import time

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from tests.unit.trainable import holders_task
from tests.unit.trainable.holders_task import Counter, Holding
from trainable.check.rehearsal import rehearse
from trainable.errors import ConfigError, TaskError
from trainable.task import Data, Task

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


LOST = {
    "half pickled": (HalfPickled, "HalfPickled"),
    "half saved": (HalfSaved, "HalfSaved"),
    "refilled": (Refilled, "Refilled"),
    "unready": (Unready, "KeyError"),
}
PLACES = ("task", "data", "collate", "optimizer", "module", "global", "class", "closure")


@pytest.fixture(autouse=True)
def _enough_time(monkeypatch):
    monkeypatch.setattr("trainable.check.rehearsal.SECONDS", 120.0)


@pytest.fixture
def holding(monkeypatch):
    """Let the holders keep a state that is lost."""

    def make(place, kind):
        monkeypatch.setitem(holders_task.MADE, "lost", kind)
        return functools.partial(Holding, place, "lost")

    return make


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", LOST)
def test_what_a_resumed_run_would_lose_is_refused(configure, holding, place, kind):
    made, said = LOST[kind]
    found = rehearse(configure(), holding(place, made))
    assert isinstance(found.problem, TaskError | ConfigError), found
    assert said in str(found.problem)
    assert "\n" not in str(found.problem)


class Plain(Task):
    """Two classes."""

    def build_model(self):
        """Return a model with dropout."""
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def build_data(self):
        """Return tensors."""
        x = torch.arange(240.0).view(60, 4).sin()
        return Data(train=(x, (x.sum(1) > 0).long()), val=(x, (x.sum(1) > 0).long()))


class Forgetful(Plain):
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


class InFile(Plain):
    """Counts in a file, which no checkpoint has."""

    def __init__(self, file):
        self.file = file

    def loss(self, model, batch):
        """Weigh by the calls so far."""
        total, weight = super().loss(model, batch)
        if not model.training:
            return total, weight
        with open(self.file, "a") as opened:
            opened.write("a")
        return total * self.file.stat().st_size, weight


class Timed(Plain):
    """Draws by a seed that nobody knows."""

    def loss(self, model, batch):
        """Add noise."""
        total, weight = super().loss(model, batch)
        return total * (1 + random.Random(time.perf_counter_ns()).random()), weight


class Clocked(Plain):
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


class Lookahead(torch.optim.SGD):
    """Synchronises with slow weights each seventh step; its state dict does not say so."""

    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.steps, self.slow = 0, None

    def step(self, closure=None):
        """Step, and sometimes go half the way back."""
        super().step(closure)
        self.steps += 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.slow is None:
            self.slow = [p.detach().clone() for p in parameters]
        if self.steps % 7 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, parameters, strict=True):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)


class Stream(IterableDataset):
    """Draws its samples from a generator of its own."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(3)
        for _ in range(60):
            x = torch.randn(4, generator=generator)
            yield x, (x.sum() > 0).long()

    def __len__(self):
        return 60


class Unusual(Plain):
    """Keeps state in many places, and all of it can be restored."""

    def __init__(self, stream=False):
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
        optimizer = Lookahead(model.parameters(), lr=config.optimizer.lr, momentum=0.9)
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
        self.average.update_parameters(self.model_of(step))

    def model_of(self, step):
        """Return the model, whatever the step."""
        del step
        return self.average.module

    def on_epoch_end(self, epoch):
        """Let the plateau see a value."""
        self.best.append(float(epoch))
        self.plateau.step(float(epoch))


@pytest.mark.parametrize("options", [{}, {"stream": True}], ids=str)
@pytest.mark.parametrize(
    "train", [{}, {"ema": {"decay": 0.9}}, {"schedule": {"name": "plateau"}}], ids=str
)
def test_unusual_task_that_resumes_exactly_passes_silently(configure, options, train):
    found = rehearse(configure(**train), functools.partial(Unusual, **options))
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
        found = rehearse(configure(), type("Stuck", (Plain,), {"loss": loss}))
        assert (found.problem, found.optimizer_bytes) == (None, None)
