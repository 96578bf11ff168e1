"""What one rank has by code that the others have not run, or by random numbers of its own.

A constructor may draw from a generator that nobody has seeded, or read a clock: the other ranks
receive what the first one has built. The first rank alone runs a task's own `evaluate()`: what
that changes is sent to the others. Hooks run on every rank, and draw the same on each.
What must not live here: which values a task or a model has (`object_state.py`), and the exchange
itself (`rank_group.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainable.errors import CheckpointError, TaskError
from trainable.object_state import ObjectState
from trainable.ranks import Ranks
from trainable.seeding import HostRngState
from trainable.step import LeftOut
from trainable.train_state import capture_random, check_state, restore_random

_LOST = "evaluate() runs on the first rank alone, and the others cannot be given the change"

_BUILT = "what a task keeps must be the same on each rank, and this cannot be sent to the others"
_BUILT_REMEDY = (
    "draw only from the generators of Python, NumPy and torch, and let nothing depend on the "
    "order of a directory, on time, process or rank; or write resources.workers: 1"
)


def build_alike(
    objects: Sequence[ObjectState], digests: Sequence[Sequence[str]], ranks: Ranks
) -> None:
    """Give the other ranks what the first one has built; every rank calls this.

    Costs nothing where all have built the same. Else they compare digests of each value, and the
    first rank sends the values that differ. What may be a rank's own stays: a path of a temporary
    file, a directory, the number of a device.
    """
    if all(other == digests[0] for other in digests):
        return
    with ranks.together() as message:
        message.own = [one.compared() for one in objects]
    found = list(zip(*message.of_ranks, strict=True))
    names = [_differing(of_ranks) for of_ranks in found]
    common = [set.intersection(*map(set, of_ranks)) for of_ranks in found]
    if not any(names):
        return
    entries: list[Any] = []
    with ranks.together():
        if ranks.is_first:
            entries = [
                one.chosen(its, all_have, lost=_BUILT, remedy=_BUILT_REMEDY)
                for one, its, all_have in zip(objects, names, common, strict=True)
            ]
            check_state(entries, "what the first rank has built")
    sent = ranks.broadcast({"entries": entries})
    assert sent is not None
    with ranks.together():
        for one, of_first, its in zip(objects, sent["entries"], names, strict=True):
            if not its:
                continue
            try:
                one.take({} if ranks.is_first else of_first, its)
            except CheckpointError as problem:
                raise TaskError(f"{_BUILT} ({problem}); {_BUILT_REMEDY}") from problem


def _differing(of_ranks: Sequence[dict[str, list[str]]]) -> set[str]:
    """Return what is on some ranks alone, or another value there."""
    first, *others = of_ranks
    return {
        name
        for other in others
        for name in first.keys() | other.keys()
        if name not in first
        or name not in other
        or all(one != its for one, its in zip(first[name], other[name], strict=True))
    }


class ChangesOfFirst:
    """What the first rank changes below some objects from now on, for the other ranks.

    Costs a pass over the objects here and in `find`, as a save does, and a message only where
    something has changed.
    """

    def __init__(self, objects: Sequence[ObjectState | LeftOut], ranks: Ranks) -> None:
        self._objects, self._ranks = objects, ranks
        watched = objects if ranks.is_first and ranks.size > 1 else ()
        self._watched = [one.from_now(lost=_LOST) for one in watched]
        self._found: list[Any] = []

    def find(self) -> bool:
        """Return whether anything has changed on this rank, which is the first one."""
        self._found = [one.state_dict() for one in self._watched]
        check_state(self._found, "what evaluate() has changed")
        return any(self._found)

    def send(self) -> None:
        """Give the other ranks what has changed; every rank calls this."""
        changes = self._ranks.broadcast({"changes": self._found} if self._found else None)
        with self._ranks.together():
            if not self._ranks.is_first:
                assert changes is not None
                _restore(self._objects, changes["changes"])


def _restore(objects: Sequence[ObjectState | LeftOut], changes: Sequence[Any]) -> None:
    try:
        for one, entries in zip(objects, changes, strict=True):
            one.load_state_dict(entries)
    except CheckpointError as problem:
        raise TaskError(
            f"{_LOST} ({problem}); make in the constructor or in build_model() what evaluate() "
            "changes, or write resources.workers: 1"
        ) from problem


@contextlib.contextmanager
def random_of_first(ranks: Ranks, device: torch.device) -> Iterator[None]:
    """Draw the random numbers of the first rank; the other ranks restore their own on exit.

    The first rank draws as a run of one process does. Every rank must call it.
    """
    if ranks.size == 1:
        yield
        return
    first = ranks.broadcast(_drawing(device) if ranks.is_first else None)
    if ranks.is_first:
        yield
        return
    assert first is not None
    host, own = HostRngState(), _of_device(device)
    restore_random(first["host"])
    _set_device(device, first["device"])
    try:
        yield
    finally:
        host.restore()
        _set_device(device, own)


def _drawing(device: torch.device) -> dict[str, Any]:
    return {"host": capture_random(devices=False), "device": _of_device(device)}


def _of_device(device: torch.device) -> torch.Tensor | None:
    # in host memory: no device synchronisation
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_device(device: torch.device, state: torch.Tensor | None) -> None:
    if state is not None:
        torch.cuda.set_rng_state(state, device)
