"""A peer's end of the protocol: a line of JSON for each question and answer.

    {"begin": {"space": ..., "epochs": 27, "seed": 0, "workers": 4, "grace": 1, "reduction": 3}}
    {"ask": {}}    -> {"trial": "7", "params": {"x0": 0.1}, "until": 9}, or null: wait for a report
    {"tell": {"trial": "7", "params": {"x0": 0.1}, "epoch": 1, "loss": 0.5, "last": false}}
                   -> whether the training goes on

An answer is `{"answer": ..., "cpu": seconds}`, or `{"error": ...}`. `space` maps names to `kind`
(`float`, `int`, `choice`), `low`, `high`, `log`, `choices`. `loss` is null where the training
diverged. `params` of a report are those that were trained, which may be neighbours of those asked.

It runs in the peer's own environment. What must not live here: anything that is not in Python's
standard library.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

_BAD = 1e3
"""The loss of a training that diverged before any loss was reported."""


class Job(NamedTuple):
    """Train a trial until an epoch; a known trial resumes."""

    trial: str
    params: dict[str, Any]
    until: int


class Report(NamedTuple):
    """A training came to the end of an epoch.

    Attributes:
        params: What was trained.
        loss: NaN where it diverged.
        last: Whether nothing follows before the trial is asked for again.
    """

    trial: str
    params: dict[str, Any]
    epoch: int
    loss: float
    last: bool


class Peer(Protocol):
    """A search of another library."""

    def ask(self) -> Job | None:
        """Return what a free worker does; None: nothing before another report."""

    def tell(self, report: Report) -> bool:
        """Take a report; returns whether the training goes on."""


class Worst:
    """Replaces the loss of a training that diverged by the highest one that was ever reported."""

    def __init__(self) -> None:
        self._worst: float | None = None

    def __call__(self, loss: float) -> float:
        if not math.isfinite(loss):
            return _BAD if self._worst is None else self._worst
        self._worst = loss if self._worst is None else max(self._worst, loss)
        return loss


def rounded(budget: float, epochs: int) -> int:
    """Return a budget that need not be whole as epochs."""
    return min(max(round(budget), 1), epochs)


def key(params: dict[str, Any]) -> str:
    """Return a name of a configuration, for libraries that have none."""
    return json.dumps(params, sort_keys=True)


def plain(value: Any) -> Any:
    """Return a number or choice without the type of a library."""
    return value.item() if hasattr(value, "item") else value


def serve(begin: Callable[[dict[str, Any]], Peer]) -> None:
    """Answer until the input ends; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer: Any = None
    for line in sys.stdin:
        ((question, arguments),) = json.loads(line).items()
        started = time.process_time()
        reply: dict[str, Any] = {}
        try:
            if question == "begin":
                peer = begin(arguments)
                reply["answer"] = True
            elif question == "ask":
                job = peer.ask()
                reply["answer"] = None if job is None else job._asdict()
            else:
                if arguments["loss"] is None:
                    arguments["loss"] = math.nan
                reply["answer"] = bool(peer.tell(Report(**arguments)))
        except Exception:  # of the library: the asking process raises it with this traceback
            reply = {"error": traceback.format_exc()}
        reply["cpu"] = time.process_time() - started
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
