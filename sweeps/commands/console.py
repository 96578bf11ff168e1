"""What all commands share: their options, the two consoles, and errors as exit codes.

What must not live here: any command.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from typer.core import TyperGroup

from sweeps.commands.plain_console import PlainConsole
from sweeps.exit_codes import HELD, NO_SUCCESS, WRONG_INPUT

if TYPE_CHECKING:
    from sweeps.results.sweep_status import SweepStatus

# A pipe has no width: tables are then as wide as what they hold.
out = PlainConsole(width=None if os.isatty(1) else 10**6)
err = PlainConsole(stderr=True)


def read_path(text: object) -> Path:
    """Read a path of the command line; an empty one would silently be the present directory."""
    if not str(text):
        raise typer.BadParameter(
            "'' names no file or directory; a path is not empty, as a shell variable is that was "
            "never set; write one, such as . for the present directory"
        )
    return Path(str(text))


def read_whole(least: int, most: int = 10**9) -> Callable[[object], int]:
    """Return what reads a whole number of the command line, and refuses one out of range."""

    def read(text: object) -> int:
        number = str(text)
        if re.fullmatch(r"-?[0-9]{1,18}", number) and least <= int(number) <= most:
            return int(number)
        from sweeps.quoting import quoted

        raise typer.BadParameter(
            f"{quoted(number)} is not valid; it must be a whole number from {least} to {most}; "
            f"write for example {least}"
        )

    return read


Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        parser=read_path,
        metavar="DIR",
        help="Where sweeps live; default: $SWEEP_ROOT, or ./runs.",
        show_default=False,
    ),
]
File = Annotated[
    Path,
    typer.Argument(
        parser=read_path, metavar="FILE", help="The sweep's YAML file.", show_default=False
    ),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The sweep's name.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-s",
        "--set",
        metavar="KEY=VALUE",
        help="Set a key of the spec, such as train.batch_size=32; may be given several times.",
        show_default=False,
    ),
]
Grace = Annotated[
    str,
    typer.Option(metavar="DURATION", help="Time to save and end after Ctrl-C: 30s, 2m, 90."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Run trials on this Ray cluster, not on this machine alone; default: $RAY_ADDRESS.",
        show_default=False,
    ),
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Ask no tracking server; `sweep sync` delivers later."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


class Commands(TyperGroup):
    """All commands, in whose help a flag has no value, as it takes none."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options that stand before any command."""
        return _without_values(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, if there is one of that name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _without_values(command.get_params(ctx))
        return command


def _without_values(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""  # or typer writes <bool>
    return params


def view_of(name: str, root: Path | None) -> SweepStatus:
    """Return a sweep as it is now; what of its spec or its outbox is damaged is
    said, and who has locked it and is no driver."""
    from sweeps.commands import messages
    from sweeps.paths import SweepPaths, resolve_root
    from sweeps.results.sweep_status import SweepStatus

    view = SweepStatus(SweepPaths(resolve_root(root), name))
    for damage in filter(None, (view.damage, view.delivered.damage, view.stranger)):
        messages.sentence(err, damage, style="yellow")
    return view


def show_found(found: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Print what was found: as JSON and nothing else, or for people."""
    with input_errors():
        if as_json:
            print(json.dumps(_finite(found), indent=2, allow_nan=False), flush=True)
        else:
            out.print(render(), crop=False)


def _finite(found: Any) -> Any:
    """Return data with null for the numbers that JSON does not have."""
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def fail(message: str, *, code: int) -> NoReturn:
    """Say why, and leave with an exit code."""
    from sweeps.commands import messages

    messages.sentence(err, message, style="red")
    raise typer.Exit(code)


@contextmanager
def input_errors() -> Iterator[None]:
    """What the user can put right becomes a message and exit code 2, a training that cannot go on
    becomes 3, and a held sweep 4.
    """
    from sweeps.errors import LedgerBusy, LedgerError, SweepLockedError
    from trainable.errors import (
        CheckpointError,
        NonFiniteGradient,
        NonFiniteLoss,
        NonFiniteMetric,
        OutOfMemory,
        TaskError,
    )
    from trainable.exception_text import traceback_of

    try:
        yield
    except (SweepLockedError, LedgerBusy) as error:
        fail(str(error), code=HELD)
    except OSError as error:
        fail(_sentence(error), code=WRONG_INPUT)
    except (NonFiniteLoss, NonFiniteGradient, NonFiniteMetric, OutOfMemory) as error:
        fail(str(error), code=NO_SUCCESS)
    except TaskError as error:
        if error.__cause__ is not None:  # of the task's own code, for its author
            err.print(traceback_of(error.__cause__), soft_wrap=True)
        fail(str(error), code=NO_SUCCESS)
    except (ValueError, LedgerError, CheckpointError) as error:
        if type(error) is ValueError:
            raise  # a bare ValueError is nobody's message to the user
        fail(str(error), code=WRONG_INPUT)


def _sentence(error: OSError) -> str:
    """What the system says about a file, as value, rule and remedy; our own errors say it so."""
    if error.errno is None or error.filename is None:
        return str(error)
    return (
        f"{error.filename} cannot be used ({error.strerror}); what is named must be there, and be "
        "yours to read and write; correct the name or its permissions"
    )
