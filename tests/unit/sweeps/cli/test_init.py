"""`sweep init` writes two valid files and overwrites none."""

from __future__ import annotations

import importlib.util
import os
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.errors import UserError
from sweeps.run.starter import write_starter
from sweeps.spec.spec import load_with_positions
from tests.message_parts import assert_parts
from tests.unit.sweeps.kill_at import kill_at


def test_starter_is_a_valid_spec_with_its_task(tmp_path: Path) -> None:
    spec_path, task_path = write_starter(tmp_path / "new")
    spec = load_with_positions(spec_path)[0]
    assert spec.task.name == "my_task:MyTask"
    assert task_path.name == "my_task.py"

    found = importlib.util.spec_from_file_location("my_task", task_path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    arguments = spec.trial_config(0, spec.example_params()).task.arguments
    task = module.MyTask(**arguments)
    data = task.build_data()
    inputs, targets = data.val
    assert task.build_model()(inputs).shape == (len(targets), 10)
    assert len(data.train[0]) + len(targets) == 1797


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    mine = tmp_path / "my_task.py"
    mine.write_text("mine")
    with pytest.raises(UserError) as caught:
        write_starter(tmp_path)
    assert_parts(str(caught.value), f"{mine} exists", "sweep init DIR")
    assert mine.read_text() == "mine"
    assert not (tmp_path / "sweep.yaml").exists()


@pytest.mark.parametrize("num_files", [0, 1])
def test_killed_init_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int
) -> None:
    kill_at(monkeypatch, os, "link", num_files, lambda: write_starter(tmp_path))
    assert len(list(tmp_path.glob("*.*"))) == num_files + 1, "one is half written"
    written = write_starter(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted(written)
    whole = write_starter(tmp_path / "other")
    assert [one.read_text() for one in written] == [one.read_text() for one in whole]


def test_disk_with_room_for_one_file_keeps_none(tmp_path: Path) -> None:
    largest = len((write_starter(tmp_path / "whole")[0]).read_bytes())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written \(File too large\)"):
            write_starter(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "full").exists()


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        write_starter(tmp_path / "file")
    assert_parts(str(caught.value), str(tmp_path / "file"), "Not a directory")


def test_printed_command_is_quoted_for_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["init", "my dir"]).output
    assert said.splitlines()[-1] == "run it with: cd 'my dir' && sweep run sweep.yaml"
