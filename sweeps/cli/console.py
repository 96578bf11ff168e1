"""Shared by all commands: options and what a shell completes, the consoles, errors as exit codes.

The shell runs `sweep` for each press of the Tab key, so completion reads nothing but names of
directories, and nothing slow is imported. What must not live here: any command.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from typer.core import TyperGroup

from sweeps.cli.plain_console import PlainConsole
from sweeps.errors import HELD, NO_SUCCESS, WRONG_INPUT


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
    from sweeps.paths import SweepPaths
    from sweeps.spec.document import Document
    from sweeps.spec.spec import SweepSpec
    from sweeps.view.sweep_view import SweepView

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


def name_argument(help_text: str) -> Any:
    """Return the argument NAME."""
    return typer.Argument(metavar="NAME", help=help_text, autocompletion=sweep_names)


Name = Annotated[
    str | None, name_argument("The sweep's name; default: the only or the newest sweep.")
]


def trial_argument(help_text: str) -> Any:
    """Return the argument TRIAL, which stands behind the sweep's name."""
    return typer.Argument(
        parser=read_whole(0),
        metavar="TRIAL",
        help=help_text,
        autocompletion=trial_numbers,
    )


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
    "clone": "init NEW --from NAME",
    "diff": "show NAME TRIAL --diff TRIAL",
    "du": "list --sizes",
    "export": "report NAME --csv DIR",
    "logs": "show NAME TRIAL --log",
    "plan": "check FILE",
    "reproduce": "audit NAME TRIAL --reproduce",
    "retry": "resume NAME --retry",
    "rm": "list NAME --remove",
    "test": "audit NAME --test",
    "trust": "doctor --trust ADDRESS",
    "verify": "audit NAME --files",
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


def _hide_types(params: list[Any]) -> list[Any]:
    """Hide the Python types that typer shows, such as `<bool>` and `<list[str]>`."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""
        elif param.param_type_name == "argument":  # its metavar is its name, which remains
            param.display_type_rich = lambda **_: ""
    return params


def paths_of(name: str | None, root: Path | None) -> SweepPaths:
    """Return the files of a sweep; without a name, of the one that began or changed last."""
    from sweeps.errors import UserError
    from sweeps.paths import SweepPaths, list_sweeps, resolve_root

    where = resolve_root(root)
    if name is not None:
        return SweepPaths(where, name)
    found = sorted(list_sweeps(where), key=lambda paths: paths.spec.stat().st_mtime_ns)
    if not found:
        raise UserError(
            f"there is no sweep below {where}; without NAME a command takes the newest one there; "
            "write --root DIR, or start one with: sweep run FILE"
        )
    if len(found) > 1:
        err.print(f"the newest sweep below {where}: {found[-1].name}", soft_wrap=True)
    return found[-1]


def view_and_trials(
    name: str | None, trials: Sequence[int | None], root: Path | None
) -> tuple[SweepView, list[int]]:
    """Read a sweep's state, and return it with the trials that were given.

    A lone number that names no sweep is a trial of the only or newest one.
    """
    numbers = [number for number in trials if number is not None]
    if name and name.isdecimal() and not numbers and not paths_of(name, root).exists():
        name, numbers = None, [read_whole(0)(name)]
    return view_of(name, root), numbers


def view_of(name: str | None, root: Path | None) -> SweepView:
    """Read a sweep's state, and warn of damaged files and of a process that blocks its lock."""
    from sweeps.cli import messages
    from sweeps.view.sweep_view import SweepView

    view = SweepView(paths_of(name, root))
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


def at_most_one(options: Mapping[str, object]) -> None:
    """Refuse options that exclude each other."""
    given = [option for option, value in options.items() if _is_given(value)]
    if len(given) > 1:
        fail(
            f"{given[0]} and {given[1]} exclude each other; leave one of them out",
            code=WRONG_INPUT,
        )


def only_with(option: str, value: object, others: Mapping[str, object]) -> None:
    """Refuse options that have no effect without another one."""
    for other, given in others.items():
        if _is_given(given) and not _is_given(value):
            fail(
                f"{other} has no effect without {option}; add {option}, or leave {other} out",
                code=WRONG_INPUT,
            )


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []


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
