"""Loaded by every Python that a chaos test starts: kills it where the test says.

`CHAOS_DIE=module:Class.method:N` sends SIGKILL to the process before its N-th call of that method,
`-N` after it. Only processes that import the module are concerned. `CHAOS_DIE_ONCE` names a file:
only the process that removes it dies, and none that is started in its place. What must not live
here: anything that happens without these variables.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import signal
import sys
from types import ModuleType
from typing import Any

VARIABLE, ONCE = "CHAOS_DIE", "CHAOS_DIE_ONCE"


class _Hook(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Lets one module be loaded as always, and then changes a method of one of its classes."""

    def __init__(self, name: str, path: str, number: int) -> None:
        self._name, self._path, self._number = name, path, number
        self._loader: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        owner, _, method = self._path.partition(".")
        kind, seen, number = getattr(module, owner), 0, self._number
        real = getattr(kind, method)

        def fatal(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == number:
                _die()
            done = real(*args, **kwargs)
            if seen == -number:
                _die()
            return done

        setattr(kind, method, fatal)


def _die() -> None:
    if ticket := os.environ.get(ONCE):
        try:
            os.unlink(ticket)
        except FileNotFoundError:
            return  # another process had it
    os.kill(os.getpid(), signal.SIGKILL)


if _place := os.environ.get(VARIABLE):
    _module, _method, _number = _place.split(":")
    sys.meta_path.insert(0, _Hook(_module, _method, int(_number)))
