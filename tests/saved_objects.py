"""Read what a checkpoint has of a run's objects, to look at it."""

from __future__ import annotations

import io
import pickle
from collections import UserList
from collections.abc import Mapping
from pydoc import locate
from typing import Any, NoReturn


class Seen(UserList[Any]):
    """What a test sees of a task, which is no state of it: pickle refuses it."""

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise TypeError("a test sees it")


class _Made:
    """An object of numpy's, which only a generator of bits can be made into."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Reader(pickle.Unpickler):
    def __init__(self, saved: Mapping[str, Any]) -> None:
        super().__init__(io.BytesIO(saved["pickle"]))
        self._tensors = saved["tensors"]

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function; a stand-in for a function that makes generators."""
        return _Made if module.startswith("numpy.random") else super().find_class(module, name)

    def persistent_load(self, written: Any) -> Any:
        """Return a tensor, or what stands for another object."""
        if written[0] == "tensor":
            return self._tensors[written[2]]
        return locate(written[1].removeprefix("@")) or written


def saved_values(state: Mapping[str, Any], root: str = "") -> dict[str, Any]:
    """Return the changed attributes below a root by their names, and other states by path's end.

    Args:
        state: The state of a run, or of one of its ranks.
        root: The name with which their paths begin.
    """
    found: dict[str, Any] = {}
    saved = state["objects"]
    for path, (_, attributes, gone) in (_Reader(saved).load() if saved else {}).items():
        if path.startswith(root):
            found |= dict.fromkeys(gone or ())
            further = attributes.pop("", None)
            found |= attributes
            found |= {} if further is None else {path.rpartition(".")[2]: further}
    return found
