"""Shared by all commands: options and what a shell completes, the consoles, errors as exit codes.

The shell runs `sweep` for each press of the Tab key, so completion reads nothing but names of
directories, and nothing slow is imported. What must not live here: any command.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, TypeVar

import typer
from rich.console import RenderableType
from typer.core import TyperGroup

from sweeps.cli.plain_console import PlainConsole
from sweeps.errors import HELD, NO_SUCCESS, WRONG_INPUT
from trainable.user_code.task_import import restart_in_hash_order


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


if TYPE_CHECKING:
    from sweeps.spec.document import Document
    from sweeps.spec.spec import SweepSpec
    from sweeps.view.sweep_view import SweepView

_P = ParamSpec("_P")
_R = TypeVar("_R")
# A pipe has no width; tables are then as wide as their content.
out = PlainConsole(width=None if os.isatty(1) else 10**6)
err = PlainConsole(stderr=True)


def read_path(text: object) -> Path:
    """Parse a path; refuse an empty one, which would silently mean the working directory."""
    if not str(text):
        raise typer.BadParameter(
            "'' names no file or directory; a path must not be empty (is a shell variable "
            "unset?); write one, such as . for the working directory"
        )
    return Path(str(text))


def read_whole(least: int, most: int = 10**9) -> Callable[[object], int]:
    """Return a parser for whole numbers from `least` to `most`."""

    def read(text: object) -> int:
        number = str(text)
        if re.fullmatch(r"-?[0-9]{1,18}", number) and least <= int(number) <= most:
            return int(number)
        from sweeps.formatting import quoted

        raise typer.BadParameter(
            f"{quoted(number)} is not valid; it must be a whole number from {least} to {most}; "
            f"write for example {least}"
        )

    return read


def read_numbers(option: str, texts: Sequence[str]) -> list[int]:
    """Parse the values of an option that takes trials, such as `4` and `7,9`."""
    read = read_whole(0)
    try:
        return [read(part.strip()) for text in texts for part in text.split(",")]
    except typer.BadParameter as error:
        raise typer.BadParameter(error.message, param_hint=f"'{option}'") from None


def path_option(flag: str, metavar: str, help_text: str) -> Any:
    """Return an option that takes a file or directory."""
    return typer.Option(flag, parser=read_path, metavar=metavar, help=help_text)


Root = Annotated[
    Path | None,
    path_option("--root", "DIR", "Directory of all sweeps; default: $SWEEP_ROOT, or ./runs."),
]
File = Annotated[
    Path,
    typer.Argument(parser=read_path, metavar="FILE", help="The sweep's YAML file."),
]
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The sweep's name.",
        autocompletion=sweep_names,
    ),
]


def trial_option(help_text: str) -> Any:
    """Return the option `--trial` of a command that takes at most one trial."""
    return typer.Option(
        "--trial",
        parser=read_whole(0),
        metavar="K",
        help=help_text,
        autocompletion=trial_numbers,
    )


TrialNumber = Annotated[
    int,
    typer.Argument(
        parser=read_whole(0),
        metavar="TRIAL",
        help="The trial's number.",
        autocompletion=trial_numbers,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-s",
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of the spec, such as train.batch_size=32; repeatable.",
    ),
]
Offline = Annotated[
    bool,
    typer.Option(
        "--offline", help="Contact no tracking server; `sweep sync` delivers the records later."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]


FORMER = {
    "plan": "check FILE",
}
"""What does today what a former command did."""


class Commands(TyperGroup):
    """All commands, with help texts that show no Python types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of `sweep` itself."""
        return _hide_types(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name; None without one. A former name is answered."""
        if cmd_name in FORMER:
            fail(
                f"'sweep {cmd_name}' is no command any more; use: sweep {FORMER[cmd_name]}",
                code=WRONG_INPUT,
            )
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _hide_types(command.get_params(ctx))
        return command


def imports_task(command: Callable[_P, _R]) -> Callable[_P, _R]:
    """Mark a command that imports a task in its own process.

    It restarts Python, before it does anything, if sets of strings would have another order than
    in the trials: a task may number classes by that order.
    """

    @functools.wraps(command)
    def restarted(*arguments: _P.args, **options: _P.kwargs) -> _R:
        restart_in_hash_order()
        return command(*arguments, **options)

    return restarted


def _hide_types(params: list[Any]) -> list[Any]:
    """Hide the Python types that typer shows, such as `<bool>` and `<list[str]>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":  # its metavar is its name, which remains
            param.display_type_rich = lambda **_: ""
    return params


def view_of(name: str, root: Path | None) -> SweepView:
    """Read a sweep's state, and warn of damaged files and of a process that blocks its lock."""
    from sweeps.cli import messages
    from sweeps.view.sweep_view import SweepView

    view = SweepView.open(name, root)
    for warning in view.warnings:
        messages.sentence(err, warning, style="yellow")
    return view


def show_found(found: Any, as_json: bool, render: Callable[[], RenderableType]) -> None:
    """Print a result, as JSON only or as text."""
    with input_errors():
        if as_json:
            print(json.dumps(_finite(found), indent=2, allow_nan=False), flush=True)
        else:
            out.print(render(), crop=False)


def _finite(found: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(found, dict):
        return {key: _finite(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_finite(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def fail(message: str, *, code: int) -> NoReturn:
    """Print an error message and exit."""
    from sweeps.cli import messages

    messages.sentence(err, message, style="red")
    raise typer.Exit(code)


@contextmanager
def loaded(file: Path, settings: list[str] | None) -> Iterator[tuple[SweepSpec, Document]]:
    """Load a spec, and attach file positions to the errors of the code that uses it."""
    from sweeps.spec.spec import load_with_positions

    with naming_directory_of(file), input_errors():
        spec, document = load_with_positions(file, settings or [])
        with document.attach_locations():
            yield spec, document


_NO_MODULE = re.compile(r"no module (?:named )?'([\w.]+)'", re.IGNORECASE)


@contextmanager
def naming_directory_of(spec: Path) -> Iterator[None]:
    """Say where the spec is, if what an error quotes is missing here and lies beside the spec."""
    try:
        yield
    except typer.Exit as ended:
        from sweeps.cli import messages

        message = str(ended.__context__ or "")
        modules = [f"{one.replace('.', os.sep)}.py" for one in _NO_MODULE.findall(message)]
        for path in (*modules, *re.findall("'([^']*)'", message)):
            if os.path.isfile(spec.parent / path) and not os.path.exists(path):
                there = shlex.quote(str(spec.parent))
                hint = f"{path} is beside the spec; repeat the command after: cd {there}"
                messages.sentence(err, hint, style="")
                break
        raise


@contextmanager
def input_errors() -> Iterator[None]:
    """Turn errors into messages and exit codes."""
    from redaction.escapes import visible
    from redaction.secrets import redact
    from sweeps.errors import LedgerBusy, LedgerError, SweepLockedError
    from trainable.errors import (
        CheckpointError,
        NonFiniteGradient,
        NonFiniteLoss,
        NonFiniteMetric,
        OutOfMemory,
        RankFailed,
        RankLost,
        TaskError,
    )
    from trainable.failures import traceback_of

    try:
        yield
    except (SweepLockedError, LedgerBusy) as error:
        fail(str(error), code=HELD)
    except OSError as error:
        fail(_sentence(error), code=WRONG_INPUT)
    except (NonFiniteLoss, NonFiniteGradient, NonFiniteMetric, OutOfMemory) as error:
        fail(str(error), code=NO_SUCCESS)
    except (RankFailed, RankLost) as error:
        for note in getattr(error, "__notes__", ()):  # its traceback, or its last words
            err.print(visible(redact(note)), soft_wrap=True)
        fail(str(error), code=NO_SUCCESS)
    except TaskError as error:
        if error.__cause__ is not None:  # the traceback of the user's task
            err.print(traceback_of(error.__cause__), soft_wrap=True)
        fail(str(error), code=NO_SUCCESS)
    except (ValueError, LedgerError, CheckpointError) as error:
        if type(error) is ValueError:
            raise  # a bare ValueError is a defect, not a message to the user
        fail(str(error), code=WRONG_INPUT)


def _sentence(error: OSError) -> str:
    """Return a file error as value, rule and remedy; our own errors have that form already."""
    if error.errno is None or error.filename is None:
        return str(error)
    return (
        f"{error.filename} cannot be used ({error.strerror}); it must exist and be readable and "
        "writable for you; correct the name or its permissions"
    )
