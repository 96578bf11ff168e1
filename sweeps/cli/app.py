"""The command line: parses arguments, calls one module, prints its result and sets the exit code.

Heavy imports are inside the commands that need them, so that `sweep --help` loads neither torch,
ray nor mlflow. What must not live here: anything that a Python caller could not do without it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from sweeps.cli import inspect
from sweeps.cli.check import check, doctor
from sweeps.cli.console import (
    Commands,
    Overrides,
    Root,
    at_most_one,
    err,
    input_errors,
    loaded,
    out,
    path_option,
    read_path,
    trial_argument,
    view_of,
)
from sweeps.cli.process_end import OutputClosed, ignore_broken_pipes, limit_exit
from sweeps.cli.run import init, resume, run, stop
from sweeps.cli.stores import list_command, sync, ui
from sweeps.cli.trust import audit, confirm
from sweeps.errors import WRONG_INPUT
from trainable.store.private_files import keep_files_private

_HELP = frozenset(("--help", "-h", "--version"))
app = typer.Typer(
    name="sweep",
    cls=Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Hyperparameter sweeps for PyTorch that survive any interruption.",
    epilog="Example: sweep init && sweep run sweep.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        out.print(f"gradsweep {version('gradsweep')}")
        raise typer.Exit


@app.callback()
def read_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Read the options that stand before any command."""


def train(
    file: Annotated[
        Path,
        typer.Argument(
            parser=read_path,
            metavar="FILE",
            help="The sweep's YAML file; with TRIAL, the name of a sweep.",
        ),
    ],
    trial: Annotated[
        int | None,
        trial_argument("Train this trial of the sweep again."),
    ] = None,
    settings: Overrides = None,
    root: Root = None,
    directory: Annotated[
        Path | None,
        path_option(
            "--dir", "DIR", "Save checkpoints there, and resume from them; default: keep nothing."
        ),
    ] = None,
    figures: Annotated[
        Path | None,
        path_option(
            "--figures", "DIR", "Write figures there: gradient norms, learning rate, metrics."
        ),
    ] = None,
) -> None:
    """Train one run, or a trial again, in this process: for a debugger."""
    from sweeps.cli.train import check_task, train_again, train_once
    from sweeps.path_checks import check_private
    from trainable.user_code.task_import import restart_in_hash_order

    restart_in_hash_order()

    def check_places() -> None:
        for option, place in (("--dir", directory), ("--figures", figures)):
            if place is not None:
                check_private(place, option)

    if trial is not None:
        at_most_one({"-s": settings, "TRIAL": trial})
        with input_errors():
            view = view_of(str(file), root)
            check_places()
            train_again(view, trial, directory, out, err, figures)
        return
    with loaded(file, settings) as (spec, _):
        check_places()
        check_task(spec, err, directory)
        train_once(spec, directory, out, err, figures)


def mcp(
    directory: Annotated[
        Path,
        typer.Argument(
            parser=read_path,
            metavar="DIR",
            help="The directory with the sweep files and tasks; sweeps are in runs/ below it.",
        ),
    ] = Path(),
) -> None:
    """Offer the sweeps of a directory to an agent, as tools of the Model Context Protocol."""
    from sweeps.api.agent import serve

    with input_errors():
        serve(directory)


def _register(group: str, *commands: tuple[Callable[..., None], str]) -> None:
    for command, example in commands:
        name = example.split()[0]
        app.command(name, epilog=f"Example: sweep {example}", rich_help_panel=group)(command)


_register(
    "Run",
    (init, "init my_project"),
    (check, "check sweep.yaml --hours 8 --write tonight.yaml"),
    (run, "run sweep.yaml -s trials=40 --name wider"),
    (resume, "resume digits -s trials=40"),
    (stop, "stop digits 3"),
    (train, "train sweep.yaml -s budget.epochs=2 --dir run1"),
)
_register(
    "Look",
    (inspect.status, "status digits --watch"),
    (inspect.trials, "trials digits --sort value --top 5"),
    (inspect.show, "show digits 3 --log --follow"),
    (inspect.best, "best digits --export best/"),
    (inspect.compare, "compare digits wider --top 3"),
    (inspect.report, "report digits --open"),
    (ui, "ui digits --port 0"),
)
_register(
    "Trust",
    (confirm, "confirm digits --top 3"),
    (audit, "audit digits 3 --reproduce --from latest"),
)
_register(
    "Keep",
    (list_command, "list --sizes --root ~/runs"),
    (sync, "sync digits --verify"),
    (doctor, "doctor --json"),
)
app.command("mcp", hidden=True)(mcp)  # what a client starts, and nobody types


def main() -> None:
    """Run the `sweep` command."""
    ignore_broken_pipes()
    code: Any = 0
    try:
        keep_files_private()
    except ValueError as error:
        if not _HELP.intersection(sys.argv):  # which writes no file
            print(error, file=sys.stderr)
            sys.exit(WRONG_INPUT)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OutputClosed as error:
        ended = error.__context__
        code = (ended.code if isinstance(ended, SystemExit) else None) or WRONG_INPUT
        with suppress(OSError):  # standard error may be the same file
            err.print(str(error), style="red", soft_wrap=True)
        sys.exit(code)
    except SystemExit as ended:
        code = ended.code
        raise
    except BaseException:  # also Ctrl-C: Python will exit with 1; raised again
        code = 1
        raise
    finally:
        if "torch" in sys.modules:  # otherwise no task ran here
            limit_exit(err, code if isinstance(code, int) else int(code is not None))
        else:  # torch's bindings report leaks after a freeze
            gc.freeze()  # saves the garbage collection at exit, which takes a second
