"""Umask and caches: what this process and its children write is out of other users' reach."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainable.errors import ConfigError
from trainable.store.private_files import NotPrivate, keep_files_private, set_cache_directories

NAMES = (
    "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TRITON_HOME", "CUDA_CACHE_PATH",
    "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "PYTHONPYCACHEPREFIX",
    "SWEEP_UMASK", "TMPDIR",
)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    before = os.umask(0o022)
    yield home
    os.umask(before)


@pytest.mark.parametrize(
    ("value", "file", "directory"),
    [
        (None, 0o600, 0o700),
        ("", 0o600, 0o700),
        ("027", 0o640, 0o750),
        ("0", 0o664, 0o775),
    ],
)
def test_files_are_private_unless_they_are_shared(
    home: Path, value: str | None, file: int, directory: int
) -> None:
    if value is not None:
        os.environ["SWEEP_UMASK"] = value
    keep_files_private()
    (home / "file").touch()
    (home / "directory").mkdir()
    assert (home / "file").stat().st_mode & 0o777 == file
    assert (home / "directory").stat().st_mode & 0o777 == directory


@pytest.mark.parametrize("value", ["8", "rwx", "-1", "07777"])
def test_other_values_are_refused(home: Path, value: str) -> None:
    del home
    os.environ["SWEEP_UMASK"] = value
    with pytest.raises(ConfigError, match=r"SWEEP_UMASK: .* is no umask.*write 027"):
        keep_files_private()


def test_private_home_keeps_its_caches(home: Path) -> None:
    """Only what torch would keep in the temporary directory is moved."""
    set_cache_directories()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(home / ".cache/gradsweep/inductor")
    assert [name for name in NAMES[1:] if name in os.environ] == ["TMPDIR"]
    assert (home / ".cache/gradsweep").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_home_that_others_may_write_to_is_not_used(home: Path, tmp_path: Path, mode: int) -> None:
    home.chmod(mode)
    os.chown(home, -1, _foreign_group())
    set_cache_directories()
    base = home / ".cache/gradsweep" if mode == 0o1777 else _fallback(tmp_path)
    for name in NAMES[:6]:
        assert os.environ[name].startswith(f"{base}/"), name
    assert base.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
@pytest.mark.parametrize("kind", ["directory", "link", "open"])
def test_planted_directory_is_refused(home: Path, tmp_path: Path, kind: str) -> None:
    (home / ".cache").touch()
    planted = _fallback(tmp_path)
    if kind == "link":
        planted.symlink_to(home)
    else:
        planted.mkdir()
    if kind == "open":
        planted.chmod(0o777)
    else:
        os.chown(planted, 12345, 12345, follow_symlinks=False)
    with pytest.raises(NotPrivate, match=r"caches of compiled code: .*; or set XDG_CACHE_HOME"):
        set_cache_directories()
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], NAMES[6]])
def test_users_own_directory_stays_if_it_is_private(home: Path, tmp_path: Path, name: str) -> None:
    os.environ[name] = str(tmp_path / "mine")
    set_cache_directories()
    assert os.environ[name] == str(tmp_path / "mine")
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine").chmod(0o777)
    with pytest.raises(NotPrivate, match=f"{name}={tmp_path}/mine: every user .*unset {name}"):
        set_cache_directories()
    del home


def _fallback(tmp_path: Path) -> Path:
    return tmp_path / f"tmp/gradsweep-cache-{os.getuid()}"


def _foreign_group() -> int:
    """A group that may have other members; -1: this user can give files to none."""
    groups = [12345] if os.geteuid() == 0 else [g for g in os.getgroups() if g != os.geteuid()]
    return groups[0] if groups else -1


def test_temporary_directory_of_this_user_is_remembered(home: Path, tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    found = [_temporary(shared) for _ in range(3)]
    assert len(set(found)) == 1
    [first] = set(found)
    assert (first.parent, first.stat().st_mode & 0o777) == (shared, 0o700)
    assert len(first.name) == len("sweep-tmp-") + 8, "nobody can foresee the name"
    assert tempfile.gettempdir() == str(first)
    first.rmdir()  # as a system does with old ones
    second = _temporary(shared)
    assert second != first
    second.chmod(0o777)
    assert _temporary(shared) not in (first, second)
    assert len([*home.glob(".cache/gradsweep/tmp-*")]) == 1


def test_users_own_temporary_directory_stays(home: Path, tmp_path: Path) -> None:
    del home
    (tmp_path / "own").mkdir()
    assert _temporary(tmp_path / "own") == tmp_path / "own"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
@pytest.mark.parametrize("kind", ["theirs", "theirs/below", "open/below"])
def test_temporary_directory_that_others_can_exchange_is_not_used(
    home: Path, tmp_path: Path, kind: str
) -> None:
    given = tmp_path / kind
    given.mkdir(parents=True)
    given.chmod(0o777)
    top = tmp_path / Path(kind).parts[0]
    top.chmod(0o777)
    if kind.startswith("theirs"):
        os.chown(top, 12345, 12345)
    found = _temporary(given)
    assert (found.parent, found.stat().st_mode & 0o777) == (home / ".cache/gradsweep", 0o700)
    assert not [*given.iterdir()]
    assert _temporary(given) == found
    assert _temporary(found) == found, "of a process that this one starts"
    assert len([*(home / ".cache/gradsweep").glob("sweep-tmp-*")]) == 1


def _temporary(given: Path) -> Path:
    """Return the directory of a process that is started with that one as TMPDIR."""
    os.environ["TMPDIR"] = str(given)
    tempfile.tempdir = None
    set_cache_directories()
    return Path(os.environ["TMPDIR"])
