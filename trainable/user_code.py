"""Which code is the user's, and that the caches of its functions can be reached.

What must not live here: torch, and what of that code's state is saved (`object_state.py`).
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import sysconfig
from pathlib import Path
from typing import Any

_OURS = frozenset({"trainable", "sweeps", "tracking", "redaction"})


@functools.cache
def is_users_module(name: str) -> bool:
    """Whether a module is the user's code, and not of an installed package."""
    top = name.partition(".")[0]
    if not name or top in _OURS or top in sys.stdlib_module_names:
        return False
    if top in ("__main__", "__mp_main__"):  # a script's variables, and a notebook's
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return False
    where = Path(file)
    paths = (sysconfig.get_path(one) for one in ("stdlib", "platstdlib", "purelib", "platlib"))
    return "site-packages" not in where.parts and not any(
        where.is_relative_to(path) for path in paths
    )


def keep_caches_reachable() -> None:
    """Let `functools.lru_cache` of the user's functions be Python's own implementation in Python.

    That in C keeps its entries where no code can reach them. A call costs a microsecond more.
    Call it before the user's modules are imported.
    """
    in_c: Any = functools.lru_cache
    if hasattr(in_c, "__wrapped__"):
        return  # it is ours already
    wanted = ("lru_cache", "_lru_cache_wrapper")
    tree = ast.parse(inspect.getsource(functools))
    found = [one for one in tree.body if getattr(one, "name", "") in wanted]
    namespace: dict[str, Any] = dict(vars(functools))
    exec(compile(ast.Module(found, []), functools.__file__, "exec"), namespace)
    in_python = namespace["lru_cache"]

    @functools.wraps(in_c)
    def lru_cache(maxsize: Any = 128, typed: bool = False) -> Any:
        if callable(maxsize):  # without parentheses
            return lru_cache()(maxsize)

        def decorate(function: Any) -> Any:
            own = is_users_module(getattr(function, "__module__", None) or "")
            return (in_python if own else in_c)(maxsize, typed)(function)

        return decorate

    functools.lru_cache = lru_cache
