"""Which entries of PYTHONPATH the command line and the processes that it starts use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sweeps.entry import _keep_directory_off_path


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("work/src", "absolute"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    return tmp_path / "work"


def _kept(work: Path, monkeypatch: pytest.MonkeyPatch, *entries: str) -> list[str]:
    """The entries that processes of the command line get, which are this process's, too."""
    whole = [os.path.abspath(entry) for entry in entries]
    rest = [path for path in sys.path if path not in whole]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entries))
    monkeypatch.setattr(sys, "path", [*whole, *rest])
    _keep_directory_off_path()
    kept = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    assert sys.path == [each for each in whole if each in kept] + rest
    assert str(work) not in kept or str(work) in entries
    return kept


@pytest.mark.parametrize("entry", ["", ".", "./", "./.", "src/..", "../work"])
def test_working_directory_is_left_out(
    work: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    absolute = str(work.parent / "absolute")
    assert _kept(work, monkeypatch, entry, absolute) == [absolute]
    assert _kept(work, monkeypatch, absolute, entry) == [absolute]
    assert _kept(work, monkeypatch, entry) == []


def test_working_directory_stays_by_its_name(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _kept(work, monkeypatch, str(work)) == [str(work)]


def test_own_relative_entry_becomes_absolute(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's working directory may be another one."""
    assert _kept(work, monkeypatch, "src") == [str(work / "src")]


def test_relative_entry_that_others_can_write_to_is_left_out(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (work / "src").chmod(0o777)
    assert _kept(work, monkeypatch, "src") == []
    said = capsys.readouterr().err
    assert said.startswith("PYTHONPATH: the entry 'src' is left out: every user may write to ")
    work.chmod(0o777)
    assert _kept(work, monkeypatch, "") == []
    assert "PYTHONPATH: the entry '' is left out: every user" in capsys.readouterr().err
