"""All file names of a sweep.

    <root>/                        default ./runs, or --root, or SWEEP_ROOT
      mlflow.db  mlartifacts/      the embedded tracking store
      .removed/<sweep>/            a sweep that `list --remove` has not removed completely yet
      <sweep>/
        sweep.yaml                 the resolved spec, one revision after another
        ledger.db
        lock  control/  outbox/
        trials/0007/               one training run's directory, owned by `trainable`
        ray/attempt-001/           Ray Tune's own files; may be deleted at any time

What must not live here: reading or writing any of these files.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from sweeps.errors import InvalidName, UserError
from sweeps.formatting import shown
from tracking.address import is_database, sqlite_uri

FORMAT = 4
"""The format version of all these files together. It increases when another release would misread
one of them. Each revision of `sweep.yaml` holds it. Every command reads that file first, and
refuses a sweep of another format."""
_LONGEST_NAME = 100
RESERVED_NAMES = {"mlflow.db", "mlartifacts"}
"""The files of the embedded tracking store, beside the sweeps' directories."""
PROGRAM = "sweep"
"""The name of the command line."""
ROOT_VARIABLE = "SWEEP_ROOT"
TRIAL_CONFIG = "config.yaml"
"""The file in a trial's directory with its resolved configuration."""


def check_name(name: str, *, model: bool = False) -> str:
    """Return a sweep's name if it may become a directory; each path of a sweep passes here."""
    visible = shown(name)
    rule = "a model's name is part of addresses" if model else "a name becomes a directory"
    remedy = "use letters, digits, '-' and '_'"
    if not name:
        raise InvalidName(f"the name is empty; {rule}; write for example digits")
    if len(name.encode(errors="replace")) > _LONGEST_NAME:
        raise InvalidName(
            f"{visible} has {len(name)} characters; {rule} and holds at most "
            f"{_LONGEST_NAME} bytes; choose a shorter one"
        )
    if any(unicodedata.category(c).startswith("C") for c in name):
        raise InvalidName(f"{visible} holds a control character; {rule}; {remedy}")
    if "/" in name or "\\" in name:
        if not model:
            remedy = "use --root to choose another place"
            rule = f"{rule} of that name below the root"
        raise InvalidName(f"{visible} holds a path separator; {rule}; {remedy}")
    if model and ":" in name:
        raise InvalidName(f"{visible} holds a ':'; {rule}; {remedy}")
    if name[0] in ".-" or ".." in name or name != name.strip():
        raise InvalidName(
            f"{visible} begins with '.', '-' or a blank, ends with a blank, or holds "
            f"'..'; {rule}; {remedy}"
        )
    if name.lower() in RESERVED_NAMES and not model:
        raise InvalidName(
            f"{visible} is the name of the embedded tracking store; {rule} beside it; choose "
            "another name"
        )
    return name


def resolve_root(root: Path | None) -> Path:
    """Return the absolute root: the given one, or `SWEEP_ROOT`, or `./runs`."""
    place = root or Path(os.environ.get(ROOT_VARIABLE) or "runs")
    try:
        place = Path(_left or "", place.expanduser()).absolute()
    except RuntimeError:
        raise UserError(
            f"--root {place}: '{place.parts[0]}' stands for the home directory of a user, and "
            "there is no such user; write a path without '~'"
        ) from None
    try:
        str(place).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--root {place}: is not valid UTF-8; databases, MLflow and Ray need paths in UTF-8; "
            "choose another directory"
        ) from None
    # Programs that normalize a URI would drop ".." together with a symbolic link before it.
    return Path(os.path.realpath(place)) if ".." in place.parts else place


_left: Path | None = None
"""The directory in which the user typed the command, if this process has left it."""


def leave_directory(directory: Path) -> None:
    """Change the working directory; commands in messages still work where the user typed one."""
    global _left
    _left = _left or Path.cwd()
    os.chdir(directory)


def command_line(
    root: Path, *words: str, program: str | None = None, anywhere: bool = False
) -> str:
    """Return a command line for a shell, with `--root` unless it is the default root.

    It works where the user typed the present one: in the same directory and environment.
    """
    option: tuple[str, ...] = ("--root", str(root))
    if not anywhere:
        with contextlib.suppress(UserError):
            option = () if root == resolve_root(None) else option
    return shlex.join((program or program_name(), *words, *option))


def program_name() -> str:
    """Return the command that starts this program: its name, or its path if not on PATH."""
    called, found = Path(_left or "", sys.argv[0]), shutil.which(PROGRAM)
    is_program = called.name == PROGRAM and called.exists()  # not a script that imports the API
    if not is_program or (found and called.samefile(found)):
        return PROGRAM
    path = os.path.relpath(called, _left)
    return path if os.sep in path else os.path.join(os.curdir, path)  # else found on PATH alone


def tracking_uri(root: Path) -> str:
    """Return the address of the embedded tracking store."""
    return sqlite_uri(root / "mlflow.db")


def artifact_root(root: Path) -> Path:
    """Return the artifact directory of the embedded tracking store."""
    return root / "mlartifacts"


def tracking_place(uri: str | None, root: Path) -> tuple[str, Path | None]:
    """Return the tracking URI of a sweep, and its artifact directory."""
    address = tracking_uri(root) if uri is None else uri
    return address, artifact_root(root) if is_database(address) else None


REMOVED = ".removed"
"""The directory in a root in which `sweep list --remove` removes sweeps."""
SCRATCH = ".export-"
"""The prefix of the directories in a sweep's own in which files are made before they are moved or
recorded. A driver removes what a killed process left there."""


@dataclass(frozen=True)
class SweepPaths:
    """The files of one sweep below a root."""

    root: Path
    name: str

    def __post_init__(self) -> None:
        check_name(self.name)

    @cached_property
    def directory(self) -> Path:
        return self.root / self.name

    @property
    def spec(self) -> Path:
        return self.directory / "sweep.yaml"

    @property
    def ledger(self) -> Path:
        return self.directory / "ledger.db"

    @property
    def report(self) -> Path:
        """The report as it was last recorded with the sweep's own run."""
        return self.directory / "report.html"

    @property
    def lock(self) -> Path:
        return self.directory / "lock"

    @property
    def control(self) -> Path:
        """Requests to the driver and heartbeats of workers; exists only while a driver runs."""
        return self.directory / "control"

    @property
    def drain(self) -> Path:
        """While this file exists, trials save a checkpoint at their next step and stop."""
        return self.control / "drain"

    def stop(self, number: int) -> Path:
        """While this file exists, the trial saves a checkpoint at its next step and ends."""
        return self.control / f"stop-{number:04d}"

    @property
    def leaves(self) -> str:
        """What the name of a file begins with, before the id of a node.

        While the file exists, the trials of that node save a checkpoint at their next step and
        continue on another node.
        """
        return str(self.control / "leaves-")

    def heartbeat(self, number: int) -> Path:
        """The file in which a trial's worker records when it last made progress."""
        return self.control / f"heartbeat-{number:04d}"

    @property
    def outbox(self) -> Path:
        return self.directory / "outbox"

    @property
    def ray(self) -> Path:
        return self.directory / "ray"

    @property
    def removed(self) -> SweepPaths:
        """Where `sweep list --remove` moves the sweep before it removes it.

        No other command takes it for a sweep: `list_sweeps` does not look there.
        """
        return SweepPaths(self.root / REMOVED, self.name)

    def trial(self, number: int) -> Path:
        return self.directory / "trials" / f"{number:04d}"

    def command(
        self, command: str, *more: str, program: str | None = None, anywhere: bool = False
    ) -> str:
        """Return a command line on this sweep for a shell. See `command_line`."""
        words = (command, self.name, *more)
        return command_line(self.root, *words, program=program, anywhere=anywhere)

    def left_without_spec(self) -> list[str]:
        """Return the remaining files of a sweep whose `sweep.yaml` is missing; empty without."""
        if self.exists():
            return []
        places = (self.ledger, self.trial(0).parent)
        return [place.name for place in places if place.exists()]

    def exists(self) -> bool:
        """Return whether a sweep of this name exists here."""
        return self.spec.exists()


def list_sweeps(root: Path) -> list[SweepPaths]:
    """Return the sweeps below `root`, sorted by name; ignore directories with invalid names."""
    found = []
    for spec in sorted(root.glob("*/sweep.yaml")) if root.is_dir() else ():
        with contextlib.suppress(InvalidName):
            found.append(SweepPaths(root, spec.parent.name))
    return found
