"""A task that keeps a state of any kind in any place that Python code can reach.

Imported anew for each run, as in a process of its own.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import mmap
import multiprocessing
import random
import threading
import types
from collections import deque

import numpy
import torch
from torch import nn
from torch.utils.data import Dataset

from trainable.task import Data, Task


class Counter:
    """An object of the user's, with attributes and slots."""

    __slots__ = ("calls", "recent")

    def __init__(self):
        self.calls, self.recent = 0, deque(maxlen=3)

    def advance(self):
        """Count, and return what was counted last."""
        self.calls += 1
        self.recent.append(self.calls)
        return sum(self.recent)


class Declared(Counter):
    """Says itself what matters of it, by the protocol of pickle."""

    __slots__ = ()

    def __getstate__(self):
        return {"calls": self.calls, "recent": list(self.recent)}

    def __setstate__(self, state):
        self.calls, self.recent = state["calls"], deque(state["recent"], maxlen=3)


class Stateful(Counter):
    """The same, by torch's words."""

    __slots__ = ()

    def state_dict(self):
        """Return the calls."""
        return {"calls": self.calls, "recent": list(self.recent)}

    def load_state_dict(self, state):
        """Take the calls."""
        self.calls = state["calls"]
        self.recent.clear()
        self.recent.extend(state["recent"])


class Phase(enum.Enum):
    """Phases, which count how often they were asked for."""

    WARM_UP = 1


class Total:
    """A descriptor that keeps what it is given, for all objects of a class."""

    def __init__(self):
        self.value = 0

    def __get__(self, owner, kind=None):
        return self.value

    def __set__(self, owner, value):
        self.value = value


class Totalled:
    """Has its number in a descriptor."""

    calls = Total()


MADE = {
    "number": lambda: 0.0,
    "text": lambda: "",
    "list": lambda: [1.0] * 2000,
    "dict": lambda: {("a", n): 0.0 for n in range(3)},
    "nested": lambda: {"of": [{"counts": [0, 0]}]},
    "array": lambda: numpy.zeros(2000),
    "tensor": lambda: torch.zeros(3),
    "replaced tensor": lambda: torch.zeros(3),
    "growing tensor": lambda: torch.zeros(1),
    "random": lambda: random.Random(3),
    "numpy": lambda: numpy.random.default_rng(3),
    "legacy numpy": lambda: numpy.random.RandomState(3),
    "torch": lambda: torch.Generator().manual_seed(3),
    "object": Counter,
    "declared": Declared,
    "stateful": Stateful,
    "late object": lambda: None,
    "iterator": lambda: iter(range(10_000)),
    "partial": lambda: functools.partial(random.Random(5).uniform, 0.0),
    "gradient": lambda: torch.zeros(3, requires_grad=True),
    "descriptor": Totalled,
    "member of an enum": lambda: Phase.WARM_UP,
}
"""A new state of each kind."""

REFUSABLE = {
    "view": lambda: {"bank": torch.zeros(3)},
    "array view": lambda: {"bank": numpy.zeros(3)},
    "function": lambda: None,
    "attribute": lambda: torch.zeros(1),
    "shared value": lambda: multiprocessing.Value("i", 0),
    "of a thread": threading.local,
    "context variable": lambda: contextvars.ContextVar("calls", default=0),
    "mapped memory": lambda: mmap.mmap(-1, 8),
    "view of memory": lambda: memoryview(bytearray(8)),
    "view of a mapping": lambda: types.MappingProxyType({"calls": [0]}),
}
"""Of further kinds, which a run may refuse."""


def advanced(kind, state):
    """Return the state after an advance of its kind, and a number that depends on all before."""
    match kind:
        case "number":
            return state + 1, state
        case "text":
            return state + "a", len(state)
        case "list":
            place = int(sum(state[:50])) * 37 % 2000
            state[place] *= 0.5
            return state, sum(state)
        case "dict":
            state["a", 1] += 1
            state.setdefault("new", []).append(0)
            return state, state["a", 1] + len(state["new"])
        case "nested":
            state["of"][0]["counts"][1] += 1
            return state, state["of"][0]["counts"][1]
        case "array":
            state[1500] += 1
            return state, state[1500]
        case "tensor":
            state += 0.1
            return state, state.sum()
        case "replaced tensor":
            return state * 0.9 + 0.1, state.sum()
        case "growing tensor":
            return torch.cat([state, state[-1:] + 1]), state.sum()
        case "random" | "numpy":
            return state, state.random()
        case "legacy numpy":
            return state, state.rand()
        case "torch":
            return state, torch.rand((), generator=state)
        case "late object":
            state = state or Counter()
            return state, state.advance()
        case "iterator":
            return state, next(state)
        case "partial":
            return state, state(1.0)
        case "gradient":
            with torch.enable_grad():
                state.sum().backward()
            return state, state.grad.sum()
        case "shared value":
            state.value += 1
            return state, state.value
        case "context variable":
            state.set(state.get() + 1)
            return state, state.get()
        case "mapped memory" | "view of memory":
            state[3] += 1
            return state, state[3]
        case "view of a mapping":
            state["calls"].append(1)
            return state, len(state["calls"])
        case "view" | "array view":
            row = state.setdefault("row", state["bank"][1:2])
            row += 1
            return state, state["bank"].sum()
        case "function":
            drawn = state() + 1 if state else 1
            return (lambda: drawn), drawn
        case "attribute" | "of a thread" | "descriptor" | "member of an enum":
            state.calls = getattr(state, "calls", 0) + 1
            return state, state.calls
    return state, state.advance()


class Holder:
    """Keeps a state."""

    def __init__(self, kind):
        self.kind, self.state = kind, (MADE | REFUSABLE)[kind]()

    def draw(self):
        """Advance the state; return a small number that depends on all before."""
        self.state, drawn = advanced(self.kind, self.state)
        return 0.01 * float(drawn) % 1.0


class Held:
    """Keeps one in its class, where all its objects share it."""

    holder = None


HOLDER = None


def in_global(holder):
    """Keep it in a variable of this module."""
    global HOLDER
    HOLDER = holder
    return lambda: HOLDER


def in_closure(kind):
    """Keep a state in a variable that a function has closed over."""
    state = (MADE | REFUSABLE)[kind]()

    def draw():
        nonlocal state
        state, drawn = advanced(kind, state)
        return 0.01 * float(drawn) % 1.0

    return draw


def by_default(kind, states={}):  # noqa: B006  the state that is meant
    """Keep a state in a default argument."""
    state = states.get(kind, (MADE | REFUSABLE)[kind]())
    states[kind], drawn = advanced(kind, state)
    return 0.01 * float(drawn) % 1.0


@functools.lru_cache(maxsize=2)
def cached(task, *, place):
    """Keep an object for a task and a place, as long as there is room."""
    return Counter(), task, place


class Samples(Dataset):
    """Samples, each with what a holder gives."""

    def __init__(self, holder):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(43, 5, generator=generator)
        self.targets = torch.randint(3, (43,), generator=generator)
        self.holder = holder

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        shift = self.holder.draw() if self.holder else 0.0
        return self.inputs[index] + shift, self.targets[index]


class Collate:
    """Adds what a holder gives to each batch."""

    def __init__(self, holder):
        self.holder = holder

    def __call__(self, samples):
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs + self.holder.draw(), targets


class Sampler:
    """Chooses samples in an order that a holder decides."""

    def __init__(self, holder):
        self.holder = holder

    def __len__(self):
        return 43

    def __iter__(self):
        first = int(43 * self.holder.draw())
        return iter([*range(first, 43), *range(first)])


class Lookahead(torch.optim.SGD):
    """Adds to each step what a holder gives; its `state_dict()` does not say so."""

    def __init__(self, parameters, holder, **options):
        super().__init__(parameters, **options)
        self.holder = holder

    def step(self, closure=None):
        """Step, and move."""
        super().step(closure)
        with torch.no_grad():
            shift = self.holder.draw()
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.01 * shift)


class Net(nn.Sequential):
    """Adds to its output what a holder gives."""

    def __init__(self, holder):
        super().__init__(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        self.holder = holder

    def forward(self, inputs):
        shift = self.holder.draw() if self.holder and self.training else 0.0
        return super().forward(inputs) * (1 + shift)


PLACES = (
    "task",
    "data",
    "collate",
    "sampler",
    "optimizer",
    "module",
    "global",
    "class",
    "closure",
    "default",
    "shared",
    "cache",
)
"""Where a state is kept; `shared`: by the task and its data set."""


class Holding(Task):
    """Three classes, five inputs, and a state that changes in training."""

    def __init__(self, place="task", kind="number", *more, shared=False):
        pairs = [place, kind, *more]
        self.kinds = dict(zip(pairs[::2], pairs[1::2], strict=True))
        self.draw, self.draws, self.holders = None, 0, {}
        holder = Holder(kind)
        for one, its in self.kinds.items():
            holder = holder if shared else Holder(its)
            if one == "global":
                self.get = in_global(holder)
            elif one == "class":
                Held.holder = holder
            elif one == "closure":
                self.draw = in_closure(its)
            else:
                self.holders[one] = holder
                if one == "shared":
                    self.holders["data"] = holder

    def build_data(self):
        """Return few samples."""
        train = Samples(self.holders.get("data"))
        val = (train.inputs, train.targets)
        collate, sampler = self.holders.get("collate"), self.holders.get("sampler")
        return Data(
            train=train,
            val=val,
            collate=Collate(collate) if collate else None,
            sampler=Sampler(sampler) if sampler else None,
        )

    def build_model(self):
        """Return a small model."""
        return Net(self.holders.get("module"))

    def build_optimizer(self, model, config):
        """Return the optimizer that keeps a state, if it is the one."""
        holder = self.holders.get("optimizer")
        if holder is not None:
            return Lookahead(model.parameters(), holder, lr=config.optimizer.lr)
        return None

    def loss(self, model, batch):
        """Return the loss with what a holder gives."""
        total, weight = super().loss(model, batch)
        if not model.training:
            return total, weight
        shift = sum(self.drawn(place) for place in self.kinds)
        return total * (1 + shift), weight

    def drawn(self, place):
        """Return what is drawn in a loss from a state in a place."""
        if place in ("task", "shared"):
            return self.holders[place].draw()
        if place == "global":
            return HOLDER.draw()
        if place == "class":
            return Held.holder.draw()
        if place == "closure":
            return self.draw()
        if place == "cache":  # of the first draw, and of three others
            self.draws += 1
            return 0.01 * cached(self, place=self.draws // 2 % 3)[0].advance()
        return by_default(self.kinds[place]) if place == "default" else 0.0
