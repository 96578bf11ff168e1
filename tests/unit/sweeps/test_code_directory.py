"""A sweep finds its code from another directory, if nobody else could have placed it there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sweeps import paths as paths_module
from sweeps.below_root import place_of
from sweeps.errors import UserError
from sweeps.paths import SweepPaths
from sweeps.run.task_code import enter_code_directory
from sweeps.spec.revisions import write_spec
from sweeps.view.sweep_status import SweepStatus
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep


@pytest.fixture(autouse=True)
def _start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paths_module, "_left", None)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project").mkdir(mode=0o755)
    (tmp_path / "project" / "code_of_mine.py").touch()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.delenv("SWEEP_ROOT", raising=False)
    yield
    os.chdir(tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    """A sweep that was run in `project`."""
    made = MadeSweep(tmp_path / "project" / "runs")
    write_spec(made.paths.spec, with_overrides(made.spec, ["task=code_of_mine:Task"]))
    _note(made, tmp_path / "project")
    return made


def _note(made: MadeSweep, code: Path, **others: Any) -> None:
    made.ledger.store_run_from({**place_of(made.paths), "code": str(code), **others})


def test_code_is_found_where_the_sweep_ran(made: MadeSweep, tmp_path: Path) -> None:
    said: list[str] = []
    start = enter_code_directory(made.view, said.append)
    assert Path.cwd() == tmp_path / "project"
    assert start / "figures" == tmp_path / "elsewhere" / "figures"
    assert said == [f"the sweep's code is in {tmp_path / 'project'}: continuing there"]
    # What is printed now is read where the command was typed: there, the root is no default.
    assert made.paths.command("resume").endswith(f"sweep resume small --root {made.paths.root}")
    assert paths_module.resolve_root(None) == tmp_path / "elsewhere" / "runs"


@pytest.mark.parametrize("where", ["elsewhere", "project"])
def test_code_in_the_present_directory_comes_first(
    made: MadeSweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path / where)
    (tmp_path / where / "code_of_mine.py").touch()
    assert enter_code_directory(made.view) / "figures" == Path("figures")
    assert Path.cwd() == tmp_path / where


def test_without_code_anywhere_nothing_changes(made: MadeSweep, tmp_path: Path) -> None:
    (tmp_path / "project" / "code_of_mine.py").unlink()
    assert enter_code_directory(made.view) == Path()
    assert Path.cwd() == tmp_path / "elsewhere"


def _world_writable(made: MadeSweep) -> None:
    made.paths.root.parent.chmod(0o777)


def _world_writable_above(made: MadeSweep) -> None:
    made.paths.root.parent.parent.chmod(0o777)


def _of_another_host(made: MadeSweep) -> None:
    _note(made, made.paths.root.parent, host="other.example")


def _received(made: MadeSweep) -> None:
    """Of an archive, say: these files never lay where the record says."""
    _note(made, made.paths.root.parent, inode=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_world_writable, "every user may write to .*project;"),
        (_world_writable_above, "every user may write to "),
        (_of_another_host, "in another directory or on another machine then"),
        (_received, "in another directory or on another machine then"),
    ],
)
def test_unsafe_directory_is_said_and_not_used(
    made: MadeSweep, tmp_path: Path, change: Callable[[MadeSweep], None], why: str
) -> None:
    change(made)
    with pytest.raises(UserError, match=f"{why}.* cd {tmp_path / 'project'}"):
        enter_code_directory(made.view)
    assert Path.cwd() == tmp_path / "elsewhere"


def test_copied_sweep_says_where_the_code_is(made: MadeSweep, tmp_path: Path) -> None:
    shutil.copytree(made.paths.root, tmp_path / "copy")
    with pytest.raises(UserError, match=f"cd {tmp_path / 'project'}"):
        enter_code_directory(SweepStatus(SweepPaths(tmp_path / "copy", "small")))
