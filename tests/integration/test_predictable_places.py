"""No library uses a name in the system's temporary directories that another user could create.

A whole sweep that compiles its model, and the commands that read it, run under strace, which shows
every file that any of their processes creates or opens. What must not live here: where caches are
instead (`tests/unit/trainable/test_private_files.py`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.integration.commandline import TINY, CommandLine
from tests.time_limits import scaled

PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""The directories of a Linux system in which every user may create files."""
KNOWN = {
    r"\.?gradsweep-[0-9a-f]{12,32}": "the driver's directory, named by its random token",
    r"sweep-tmp-[a-z0-9_]{8}": "mkdtemp of this user's temporary directory",
    r"tmp[a-z0-9_]{8}": "mkstemp and mkdtemp of Python",
    r"[a-z0-9_]{8}": "Python tries whether it can create a file with a random name",
    r"pymp-[a-z0-9_]{8}": "mkdtemp of multiprocessing",
    r"cc[A-Za-z0-9]{6}\.[\w.]+": "mkstemp of the compiler",
    r"plasma[A-Za-z0-9]{6}": "mkstemp of Ray's object store",
    r"sem\.(mp-[a-z0-9_]{8}|[A-Za-z0-9]{6})": "semaphores of multiprocessing",
    r"torch_\d+_\d+_\d+": "memory that torch shares, with a random number, created anew",
}
"""Patterns of names that nobody can foresee, with the reason."""
CALLS = (
    "open,openat,creat,mkdir,mkdirat,mknod,mknodat,link,linkat,symlink,symlinkat,rename,renameat,"
    "renameat2,unlink,unlinkat,truncate,chmod,fchmodat,execve,bind,connect"
)
CREATES = re.compile("mkdir|mknod|creat$|link|symlink|rename|bind")
SPEC = (
    TINY.replace("trials: 2", "trials: 1").replace("search:", "train: {compile: true}\nsearch:")
)  # fmt: skip


class Call(NamedTuple):
    """A system call with a path."""

    name: str
    path: str
    line: str


def calls(trace: Path) -> Iterator[Call]:
    """Yield the calls of a trace that name a path, whether it is absolute or not."""
    with trace.open(errors="replace") as lines:
        for line in lines:
            if found := re.match(r"\d+ +(\w+)\(", line):
                paths = re.findall(r'(?:<(/[^>]*)>, )?(?:sun_path=)?"([^"]*)"', line)
                for base, path in paths[:1] if found[1] == "execve" else paths:
                    whole = path if path.startswith("/") else f"{base}/{path}"
                    yield Call(found[1], re.sub("/+", "/", whole), line)


def name_below(path: str, kept: Iterable[Path]) -> str | None:
    """Return the first name of a path below one of the places, except in directories to keep."""
    for directory in map(str, kept):
        if f"{path}/".startswith(f"{directory}/") or directory.startswith(path):
            return None
    return next(
        (path[len(place) + 1 :].split("/")[0] for place in PLACES if path.startswith(f"{place}/")),
        None,
    )


@pytest.fixture(scope="module")
def kept(module_cli: CommandLine) -> list[Path]:
    """Directories that may lie below one of the places: pytest's own, and this project's."""
    return [module_cli.directory.parent.parent, module_cli.project, Path(sys.prefix)]


@pytest.fixture(scope="module")
def traced(module_cli: CommandLine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The trace of a whole sweep, and of what is made of it."""
    cli, trace = module_cli, tmp_path_factory.mktemp("trace") / "trace"
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace shows which files all processes open; install it")
    options = ["-f", "-y", "-qq", "--seccomp-bpf", "-e", "signal=none", "-e", f"trace={CALLS}"]
    cli.within = (strace, *options, "-A", "-o", str(trace))
    probe = subprocess.run([*cli.within, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace may not trace processes here: {probe.stderr.strip()}")
    cli.write("small.yaml", SPEC)
    (cli.directory / "home").mkdir()
    cli.environment["HOME"] = str(cli.directory / "home")
    for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"):
        cli.environment.pop(name, None)
    for command in (
        "run small.yaml",
        "report small",
        "report small --csv tables",
    ):
        process = cli.start(*command.split())
        printed, _ = process.communicate(timeout=scaled(240))
        assert process.returncode == 0, f"{command}\n{printed}"
    yield trace
    for link in (cli.directory / "home/.cache/gradsweep").glob("tmp-*"):
        shutil.rmtree(link.resolve())  # of this test's home alone


def test_no_predictable_name_is_used(kept: list[Path], traced: Path) -> None:
    unknown = set()
    for call in calls(traced):
        name = name_below(call.path, kept)
        if name and not any(re.fullmatch(known, name) for known in KNOWN):
            unknown.add(f"{call.name} {name}: {call.line.strip()[:300]}")
    assert unknown == set()


def test_each_name_was_created_here(kept: list[Path], traced: Path) -> None:
    """A name that no process of the sweep created is predictable, even if it looks random."""
    used, created = set(), set()
    for call in calls(traced):
        if name := name_below(call.path, kept):
            used.add(name)
            # the last path of a call is what it creates: `symlink("/tmp/theirs", "/tmp/ours")`
            last = re.findall(r'"([^"]*)"', call.line)[-1]
            if CREATES.match(call.name) or "O_CREAT" in call.line or "O_TMPFILE" in call.line:
                created |= {name} if call.path.endswith(last) else set()
    # each driver looks at those of this user that were left behind
    assert [name for name in used - created if not name.startswith("gradsweep-")] == []


def test_new_names_are_private(kept: list[Path], traced: Path) -> None:
    """A directory gets mode 0700, and a file is created only if its name is not taken."""
    wrong, created = [], set()
    for call in calls(traced):
        name = name_below(call.path, kept)
        if not name or not call.path.endswith(f"/{name}") or " = -1 " in call.line:
            continue
        if call.name.startswith("mkdir") and not re.search(r", 0700\)?", call.line):
            wrong.append(call.line)
        elif "O_CREAT" in call.line and call.path not in created:
            created.add(call.path)
            if "O_EXCL" not in call.line:
                wrong.append(call.line)
    assert (wrong, bool(created)) == ([], True)


def test_compiled_code_is_in_the_users_own_cache(module_cli: CommandLine, traced: Path) -> None:
    cache = module_cli.directory / "home/.cache/gradsweep"
    assert any(call.path.startswith(f"{cache}/inductor/") for call in calls(traced))
    assert cache.stat().st_mode & 0o777 == 0o700
