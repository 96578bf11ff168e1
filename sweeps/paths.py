"""Every file name of a sweep, in one place.

    <root>/                        default ./runs, or --root, or SWEEP_ROOT
      mlflow.db  mlartifacts/      the embedded tracking store
      <sweep>/
        sweep.yaml                 the spec as resolved, one revision after another
        ledger.db                  unless it is in a database (storage.ledger)
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
from sweeps.quoting import shown
from tracking.address import address_of, is_database

FORMAT = 2
"""The form of all these files together. It grows when an earlier release would misread one of
them. Written into each revision of `sweep.yaml`, which every command reads before any other file;
a sweep without it is of format 1, from before there was a number."""
_LONGEST_NAME = 100
# The tracking store's own, beside the sweeps' directories.
_RESERVED_NAMES = {"mlflow.db", "mlartifacts"}
ROOT_VARIABLE = "SWEEP_ROOT"
TRIAL_CONFIG = "config.yaml"
"""In a trial's directory: its resolved configuration."""


def check_name(name: str, *, model: bool = False) -> str:
    """Return a sweep's name when it may become a directory; the only way from names to paths.

    Args:
        model: It is a registered model's name, which MLflow makes paths and addresses of.

    Raises:
        InvalidName: With value, rule and remedy.
    """
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
    if name.lower() in _RESERVED_NAMES and not model:
        raise InvalidName(
            f"{visible} is where the embedded tracking store lives; {rule} beside it; "
            "choose another name"
        )
    return name


def resolve_root(root: Path | None) -> Path:
    """Return the absolute root: the given one, or `SWEEP_ROOT`, or `./runs`.

    Raises:
        Refused: It lies in the home of nobody, or its name is no text.
    """
    place = root or Path(os.environ.get(ROOT_VARIABLE) or "runs")
    try:
        place = place.expanduser().absolute()
    except RuntimeError:
        raise UserError(
            f"--root {place}: nobody here has a home that '{place.parts[0]}' stands for; sweeps "
            "live in directories below a root; write a path without '~'"
        ) from None
    try:
        str(place).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"--root {place}: a part of it is no UTF-8, which databases, MLflow and Ray need; "
            "write a path of which each directory is"
        ) from None
    # Whoever is given an address would leave out ".." together with the link before it.
    return Path(os.path.realpath(place)) if ".." in place.parts else place


def command_line(root: Path, *words: str, program: str = "sweep") -> str:
    """Return a command as a shell takes it; where its sweeps live is left out where it would look
    there anyway.

    Args:
        root: Where they live.
        words: The command, its arguments and options.
        program: How it is called.
    """
    where: tuple[str, ...] = ("--root", str(root))
    with contextlib.suppress(UserError):
        where = () if root == resolve_root(None) else where
    return shlex.join((program, *words, *where))


def program_name() -> str:
    """Return how this program is called from here: by its name, or else by its path."""
    called, found = Path(sys.argv[0]), shutil.which("sweep")
    if not called.exists() or (found and called.samefile(found)):
        return "sweep"
    return os.path.relpath(called)


def tracking_uri(root: Path) -> str:
    """The embedded tracking store's address."""
    return address_of(root / "mlflow.db")


def artifact_root(root: Path) -> Path:
    """Where the embedded tracking store keeps its artifacts."""
    return root / "mlartifacts"


def tracking_place(uri: str | None, root: Path) -> tuple[str, Path | None]:
    """Return where a sweep is recorded, and where its artifacts lie.

    Args:
        uri: Its `tracking.uri`; None: the embedded store.
        root: Where sweeps live.

    Returns:
        The address, and the artifacts' directory; None leaves that to a server.
    """
    address = tracking_uri(root) if uri is None else uri
    return address, artifact_root(root) if is_database(address) else None


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
        """What is asked of the sweep while it runs; gone when no driver holds it."""
        return self.directory / "control"

    @property
    def drain(self) -> Path:
        """While this file exists, trials checkpoint at their next step and end."""
        return self.control / "drain"

    def stop(self, number: int) -> Path:
        """While this file exists, that trial checkpoints at its next step and is over."""
        return self.control / f"stop-{number:04d}"

    def heartbeat(self, number: int) -> Path:
        """While a worker has that trial, what says when it last made progress."""
        return self.control / f"heartbeat-{number:04d}"

    @property
    def outbox(self) -> Path:
        return self.directory / "outbox"

    @property
    def ray(self) -> Path:
        return self.directory / "ray"

    def trial(self, number: int) -> Path:
        return self.directory / "trials" / f"{number:04d}"

    def command(self, command: str, *more: str, program: str = "sweep") -> str:
        """Return a command on this sweep as a shell takes it. See `command_line`."""
        return command_line(self.root, command, self.name, *more, program=program)

    def left_without_spec(self) -> list[str]:
        """What is left of a sweep whose `sweep.yaml` is gone; empty where there never was one."""
        if self.exists():
            return []
        places = (self.ledger, self.trial(0).parent)
        return [place.name for place in places if place.exists()]

    def exists(self) -> bool:
        """Whether a sweep of this name was ever created here."""
        return self.spec.exists()


def list_sweeps(root: Path) -> list[SweepPaths]:
    """The sweeps below `root`, by name; a directory that none could have made is none."""
    found = []
    for spec in sorted(root.glob("*/sweep.yaml")) if root.is_dir() else ():
        with contextlib.suppress(InvalidName):
            found.append(SweepPaths(root, spec.parent.name))
    return found
