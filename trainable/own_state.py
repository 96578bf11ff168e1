"""OwnState: what a task or a module saves by methods of its own, and how that has changed.

It stands beside `ObjectState`, which finds the changes of everything else. What must not live
here: where such states are saved (`train_state.py`).
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from trainable.object_state import ObjectState
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

    def _taken(self) -> tuple[Any, bytes]:
        taken, file = snapshot({"own": self._read()}), io.BytesIO()
        write_state(taken, file)
        return taken["own"], file.getvalue()


def extra_states(*roots: nn.Module) -> list[OwnState]:
    """Return the states of modules with `get_extra_state()`, each once."""
    return [
        OwnState(module.get_extra_state, module.set_extra_state)
        for module in dict.fromkeys(one for root in roots for one in root.modules())
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]


KeptState = ObjectState | OwnState
"""A state whose changes can be found, sent to other ranks, and undone."""
