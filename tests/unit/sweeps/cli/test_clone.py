"""`sweep init --from`: writes a spec as another sweep is configured, and starts nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from sweeps.cli.app import app
from sweeps.paths import SweepPaths
from sweeps.spec.revisions import changes, read_spec, write_spec
from sweeps.spec.spec import load_with_positions
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep


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


@pytest.mark.usefixtures("sweep")
def test_name_that_looks_like_a_number_stays_text() -> None:
    assert _clone("small", "1e3").exit_code == 0
    assert load_with_positions(Path("1e3.yaml"))[0].name == "1e3"


@pytest.mark.usefixtures("sweep")
def test_command_to_run_names_the_root(tmp_path: Path) -> None:
    os.rename("runs", "elsewhere")
    done = _clone("small", "new", "--root", "elsewhere")
    assert f"sweep run new.yaml --root {tmp_path / 'elsewhere'}" in done.stdout


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (("small", "small"), "sweep 'small' exists already"),
        (("small", "../new"), "holds a path separator"),
        (("smal", "new"), "did you mean 'small'?"),
        (("small", "new", "-s", "trails=3"), "did you mean 'trials'?"),
        (("small", "new", "-s", "trials=0"), "-s trials=0: trials: "),
    ],
    ids=["taken", "invalid", "unknown", "key", "value"],
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
