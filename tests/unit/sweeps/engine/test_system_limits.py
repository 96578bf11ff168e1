"""System limits that are too low are named; an unknown account gets a name."""

from __future__ import annotations

import os
import pwd
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.account import complete_account
from sweeps.engine import system_limits
from sweeps.engine.system_limits import LimitTooSmall, check_limits


def _limited(limits: str) -> str:
    """What a process says of itself that a shell with these limits starts."""
    code = "from sweeps.engine.system_limits import shortages; print(*shortages(), sep='\\n')"
    return subprocess.run(
        ["sh", "-c", f'{limits}; exec "$0" -P -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ("ulimit -v 4194304", "ulimit -v is 4096 MiB"),
        ("ulimit -f 2048", "ulimit -f is 1 MiB"),
        ("ulimit -n 100", "ulimit -n is 100"),
    ],
)
def test_a_limit_that_is_too_small_is_named(limits: str, told: str) -> None:
    assert told in _limited(limits)


FREE = resource.RLIM_INFINITY


def _set_limits(monkeypatch: pytest.MonkeyPatch, **limits: tuple[int, int]) -> list[Any]:
    """Let the process have these limits and no others; returns what it asks for."""
    numbers = {getattr(resource, name): values for name, values in limits.items()}
    asked: list[Any] = []

    def change(which: int, values: tuple[int, int]) -> None:
        asked.append(values)
        numbers[which] = values

    monkeypatch.setattr(resource, "getrlimit", lambda which: numbers.get(which, (FREE, FREE)))
    monkeypatch.setattr(resource, "setrlimit", change)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    return asked


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("RLIMIT_AS", 4 * 2**30, "ulimit -v is 4096 MiB;"),
        ("RLIMIT_FSIZE", 2 * 2**20, "ulimit -f is 2 MiB;"),
        ("RLIMIT_NOFILE", 60, "ulimit -n is 60;"),
        ("RLIMIT_NPROC", 20, "ulimit -u is 20;"),
    ],
)
def test_too_low_limit_refuses_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int, told: str
) -> None:
    _set_limits(monkeypatch, **{name: (value, value)})
    with pytest.raises(LimitTooSmall, match=told):
        check_limits()


@pytest.mark.parametrize(("hard", "allowed"), [(FREE, 4096), (1000, 1000), (20_000, 4096)])
def test_open_file_limit_is_raised(
    monkeypatch: pytest.MonkeyPatch, hard: int, allowed: int
) -> None:
    asked = _set_limits(monkeypatch, RLIMIT_NOFILE=(60, hard))
    check_limits()
    assert asked == [(allowed, hard)]


def test_missing_temporary_directory_refuses_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _set_limits(monkeypatch)
    check_limits()
    monkeypatch.setattr(system_limits, "TEMPORARY", tmp_path)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LimitTooSmall, match=f"{tmp_path} cannot be written to"):
        check_limits()


def test_unknown_account_gets_a_name_and_a_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(_: int) -> Any:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "")
    complete_account()
    assert os.environ["USER"] == f"uid{os.getuid()}"
    home = Path(os.environ["HOME"])
    assert home.stat().st_mode & 0o777 == 0o700
    assert home.parent == tmp_path
    monkeypatch.setenv("HOME", "")
    home.rmdir()
    home.symlink_to(tmp_path)  # somebody else's work
    complete_account()
    assert os.environ["HOME"] == ""
