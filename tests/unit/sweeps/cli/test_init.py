"""`sweep init` writes two valid files and overwrites none."""

from __future__ import annotations

import importlib.util
import os
import resource
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.errors import UserError
from sweeps.paths import SweepPaths
from sweeps.run.starter import write_starter
from sweeps.spec.revisions import changes, read_spec, write_spec
from sweeps.spec.spec import load_with_positions
from tests.message_parts import assert_parts
from tests.specs import with_overrides
from tests.unit.sweeps.kill_at import kill_at
from tests.unit.sweeps.sweep_factory import MadeSweep


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


def test_printed_command_is_quoted_for_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["init", "my dir"]).output
    assert said.splitlines()[-1] == "run it with: cd 'my dir' && sweep run sweep.yaml"


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MadeSweep:
    monkeypatch.chdir(tmp_path)
    return MadeSweep(tmp_path / "runs")


def _clone(*words: str) -> Result:
    return CliRunner().invoke(app, ["init", "--from", *words])


def test_clone_differs_only_in_what_is_asked_for(sweep: MadeSweep) -> None:
    write_spec(sweep.paths.spec, with_overrides(sweep.spec, ["train.batch_size=17"]))
    done = _clone("small", "wider", "-s", "trials=40", "-s", "space.train.clip.max_norm=null")
    assert done.exit_code == 2  # null is no distribution
    done = _clone("small", "wider", "-s", "trials=40", "-s", "task.hidden=7")
    assert (done.exit_code, done.stderr) == (0, "")
    made = load_with_positions(Path("wider.yaml"))[0]
    assert made.train.batch_size == 17  # of the newest revision
    differing = changes(read_spec(sweep.paths.spec).spec, made)
    assert differing == {
        "name": ("small", "wider"), "trials": ("3", "40"), "task.hidden": ("nothing", "7")
    }  # fmt: skip
    assert "changed: name: small -> wider, trials: 3 -> 40, task.hidden: nothing -> 7" in (
        done.stdout
    )
    assert "run it with: sweep run wider.yaml" in done.stdout
    assert [path.name for path in Path("runs").iterdir()] == ["small"]  # nothing is started


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("small", "small"), "sweep 'small' exists already"),
        (("small", "../new"), "holds a path separator"),
        (("small", "new", "-s", "trails=3"), "did you mean 'trials'?"),
    ],
    ids=["taken", "invalid", "key"],
)
@pytest.mark.usefixtures("sweep")
def test_wrong_clone_writes_nothing(words: tuple[str, ...], part: str) -> None:
    done = _clone(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert part in done.stderr
    assert [path.name for path in Path().iterdir()] == ["runs"]


@pytest.mark.parametrize("kind", ["file", "link"])
@pytest.mark.usefixtures("sweep")
def test_no_file_is_overwritten(kind: str) -> None:
    if kind == "file":
        Path("new.yaml").write_text("mine")
    else:
        Path("new.yaml").symlink_to("elsewhere.yaml")
    done = _clone("small", "new")
    assert done.exit_code == 2
    assert "new.yaml exists already" in done.stderr
    assert kind == "link" or Path("new.yaml").read_text() == "mine"
    assert not Path("elsewhere.yaml").exists()


def test_untrusted_store_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who runs a file of their own trusts its stores; this one was named by someone else."""
    monkeypatch.chdir(tmp_path)
    MadeSweep(tmp_path / "runs", more="tracking: {uri: 'https://evil.example'}")
    done = _clone("small", "new")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "https://evil.example" in done.stderr
    assert not Path("new.yaml").exists()
    assert _clone("small", "new", "-s", "tracking.uri=null").exit_code == 0
    assert load_with_positions(Path("new.yaml"))[0].tracking.uri is None
    assert not SweepPaths(tmp_path / "runs", "new").exists()
