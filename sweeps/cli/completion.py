"""What a shell completes: names of sweeps, and numbers of trials.

The shell runs `sweep` for each press of the Tab key. So nothing is read here but names of
directories, and nothing slow is imported. What must not live here: options and commands.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import typer


def sweep_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the sweeps below the root whose names begin so."""
    from sweeps.paths import list_sweeps, resolve_root

    with contextlib.suppress(ValueError, OSError):  # a shell shows no messages
        root = ctx.params.get("root")
        given = set(ctx.params.get("names") or ())
        names = [paths.name for paths in list_sweeps(resolve_root(root))]
        return [name for name in names if name.startswith(incomplete) and name not in given]
    return []


def trial_numbers(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the trials of the sweep that is named before; those that have a directory."""
    with contextlib.suppress(ValueError, OSError):
        numbers = sorted(int(path.name) for path in _trials(ctx) if path.name.isdecimal())
        return [str(number) for number in numbers if str(number).startswith(incomplete)]
    return []


def _trials(ctx: typer.Context) -> list[Path]:
    from sweeps.paths import SweepPaths, resolve_root

    # After an option without its value, as in `stop digits --trial`, arguments are not parsed yet.
    name = ctx.params.get("name") or next(iter(ctx.args), "")
    paths = SweepPaths(resolve_root(ctx.params.get("root")), name)
    return list(paths.trial(0).parent.iterdir())
