"""No name on the command line leads out of the root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.unit.sweeps.sweep_factory import MadeSweep

BAD = {
    "../other/made": "holds a path separator",
    "..": "begins with '.'",
    "sub/made": "holds a path separator",
    "made\n": "holds a control character",
    "m" * 101: "holds at most 100 bytes",
}
MORE = {
    "show": ["0"],
    "ui": ["--no-open"],
}
"""What a command needs beside the name."""


def _uses() -> Iterator[tuple[str, ...]]:
    """Every command that takes the name of a sweep, up to where it stands."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for parameter in command.params:
            if parameter.param_type_name == "argument" and parameter.name in ("name", "names"):
                yield (name,)
            if parameter.name == "name" and parameter.param_type_name == "option":
                yield (name, "s.yaml", "--name")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sweeps where names must not lead, beside the root."""
    here = tmp_path_factory.mktemp("place") / "here"
    here.mkdir()
    spec = "name: x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 1\n"
    (here / "s.yaml").write_text(spec)
    for root in ("other", "runs", "runs/sub"):
        MadeSweep(here / root, "made").add("complete", 0.5)
    return here


@pytest.fixture
def place(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


def _all_below(place: Path) -> dict[Path, bytes | None]:
    found = sorted(place.rglob("*"))
    return {path: path.read_bytes() if path.is_file() else None for path in found}


def test_every_command_with_a_name_is_covered() -> None:
    assert {use[0] for use in _uses()} == {
        "run", "resume", "stop", "status", "trials", "show", "best", "compare", "report", "ui",
        "confirm", "audit", "list", "sync",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("use", "name"),
    [*((use, "../other/made") for use in _uses()), *((("status",), name) for name in BAD)],
    ids=lambda one: repr(one[:20]),
)
def test_invalid_name_is_refused_by_every_command(
    place: Path, use: tuple[str, ...], name: str
) -> None:
    before = _all_below(place)
    done = CliRunner().invoke(app, [*use, name, *MORE.get(use[0], [])])
    assert (done.exit_code, done.stdout) == (2, "")
    assert BAD[name] in done.stderr
    assert _all_below(place) == before


@pytest.mark.parametrize("name", ["..", "a/b", "a:b"])
@pytest.mark.usefixtures("place")
def test_model_name_is_checked_before_registering(name: str) -> None:
    done = CliRunner().invoke(app, ["best", "made", "--register", name])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "; a model's name is part of addresses" in done.stderr


@pytest.mark.parametrize("task", ["sub/evil:Task", "../evil:Task", "/tmp/evil:Task", "evil\n:T"])
def test_task_name_is_no_path(place: Path, task: str) -> None:
    """What it names is found by Python's import alone, which knows no separators."""
    marker = place / "marker"
    for directory in (place, place / "sub", place.parent):
        directory.mkdir(exist_ok=True)
        (directory / "evil.py").write_text(
            f"import pathlib; pathlib.Path({str(marker)!r}).touch()"
        )
    done = CliRunner().invoke(app, ["check", "s.yaml", "-s", f"task={task!r}"])
    assert done.exit_code == 2
    assert "must be importable from where you start" in done.stderr
    assert not marker.exists()


def test_check_prints_modules_before_importing_them(place: Path) -> None:
    (place / "samplers").mkdir()
    (place / "samplers" / "mine.py").write_text("raise RuntimeError('imported')\n")
    settings = ["-s", "task=tasks.own:Task", "-s", "search.sampler=samplers.mine:Sampler"]
    done = CliRunner().invoke(app, ["check", "s.yaml", *settings])
    assert done.exit_code == 2
    assert done.stdout.splitlines() == [
        "imports samplers.mine, whose code runs",
        "imports tasks.own, whose code runs",
    ]
    assert "RuntimeError: imported" in done.stderr
