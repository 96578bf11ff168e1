"""Write what Python gives as text: the keys of a sweep file, overrides and flags.

What must not live here: running the command that receives them (`command`).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweeps.config.yaml_scalars import write_flow, write_key
from sweeps.errors import UserError
from sweeps.quoting import quoted


def sweep_file(keys: Mapping[str, Any]) -> str:
    """Return a sweep file with these keys."""
    return "".join(f"{write_key(k)}: {write_flow(_plain(v))}\n" for k, v in keys.items())


def override_texts(overrides: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the texts KEY=VALUE of overrides."""
    return tuple(f"{key}={write_flow(_plain(value))}" for key, value in (overrides or {}).items())


def flags_of(**given: bool) -> list[str]:
    """Return the options of the command line that are given."""
    return [f"--{name.replace('_', '-')}" for name, is_given in given.items() if is_given]


def _plain(value: Any) -> Any:
    """Return a value as plain data; an imported class or function stands for its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value.tolist()
    if value is None or isinstance(value, str | int | float):
        return value
    if not hasattr(value, "__qualname__"):
        raise UserError(
            f"{quoted(repr(value))} is a {type(value).__name__}, which a sweep file cannot hold; "
            "values are numbers, texts, lists, mappings and None; write it as one of them"
        )
    module, name = value.__module__, value.__qualname__
    if module == "__main__" or "<locals>" in name or name not in vars(sys.modules[module]):
        raise UserError(
            f"{name} is defined in {'this notebook or script' if module == '__main__' else module}"
            ", and the processes of the trials could not import it; a task stands at the top of a "
            "module; in a notebook, begin its cell with %%writefile my_task.py, and write "
            f"task='my_task:{name.rpartition('.')[2]}'"
        )
    return f"{module}:{name}"
