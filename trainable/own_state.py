"""OwnState: what a task or a module saves by methods of its own, and how that has changed.

It stands beside `ObjectState`, which finds the changes of everything else. What must not live
here: where such states are saved (`train_state.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from trainable.object_state import ObjectState
from trainable.reachable import tensor_signature
from trainable.snapshot import snapshot, write_state


class OwnState:
    """A state that its owner returns and loads; compared by the bytes that a save would write.

    Args:
        read: Returns the state: tensors and plain data.
        load: Takes it.
    """

    def __init__(self, read: Callable[[], Any], load: Callable[[Any], object]) -> None:
        self._read, self._load = read, load
        self._before = b""

    def from_now(self, *, lost: str) -> OwnState:
        """Return one that finds whether the state has changed since this call."""
        del lost  # each state can be loaded
        other = OwnState(self._read, self._load)
        _, other._before = self._taken()
        return other

    def state_dict(self) -> list[Any]:
        """Return the state alone if it has changed, and nothing otherwise."""
        state, content = self._taken()
        return [] if content == self._before else [state]

    def load_state_dict(self, entries: list[Any]) -> None:
        """Load what `state_dict` returned."""
        for state in entries:
            self._load(state)

    @contextlib.contextmanager
    def kept(self, *, lost: str) -> Iterator[None]:
        """Load on exit the state that was there, if it has changed within the context."""
        del lost
        state, before = self._taken()
        yield
        if self._taken()[1] != before:
            self._load(state)

    def digest(self) -> str:
        """Return a digest of the state as it is now."""
        return hashlib.sha256(self._taken()[1]).hexdigest()

    def compared(self) -> dict[str, list[str]]:
        """Return its digest, twice, as `ObjectState.compared` does."""
        return {"": [self.digest()] * 2}

    def chosen(
        self, names: Collection[str], common: Collection[str], *, lost: str, remedy: str
    ) -> list[Any]:
        """Return the state if it is among the names."""
        del common, lost, remedy  # each state can be loaded
        return [self._taken()[0]] if names else []

    def take(self, entries: list[Any], names: Collection[str]) -> None:
        """Load what `chosen` returned on the first rank; a save always has it."""
        del names
        self.load_state_dict(entries)

    def _taken(self) -> tuple[Any, bytes]:
        taken, file = snapshot({"own": self._read()}), io.BytesIO()
        write_state(taken, file)
        return taken["own"], file.getvalue()


class LeftOut:
    """The values of parameters that the optimizer does not have, such as frozen ones.

    A save has them with the model.

    Args:
        parameters: Those that this rank has whole.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = parameters
        self._before: list[object] = []

    def from_now(self, *, lost: str) -> LeftOut:
        """Return one that finds which of them have changed since this call."""
        del lost  # each can be copied
        other = LeftOut(self.parameters)
        other._before = [tensor_signature(one) for one in self.parameters]
        return other

    def state_dict(self) -> list[Any]:
        """Return the number and the value of each that has changed."""
        return [
            [number, one.detach()]
            for number, (one, before) in enumerate(zip(self.parameters, self._before, strict=True))
            if tensor_signature(one) != before
        ]

    def load_state_dict(self, entries: list[Any]) -> None:
        """Copy what `state_dict` returned."""
        for number, value in entries:
            self.parameters[number].detach().copy_(value)


KeptState = ObjectState | OwnState
"""A state whose changes can be found, sent to other ranks, and undone."""
