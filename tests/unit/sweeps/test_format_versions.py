"""A sweep of another format is refused by every command, in one sentence, and left unchanged."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.paths import FORMAT, SweepPaths
from sweeps.run.doctor import check_sweeps
from tests.message_parts import assert_parts
from tests.unit.sweeps.interrupted_sweep import interrupted
from tests.unit.sweeps.sweep_factory import MadeSweep

NO_SWEEP_NEEDED = {"init", "check", "run", "train", "list", "doctor", "mcp"}
MORE = {
    "show": ["0"],
    "stop": ["--now"],
    "best": ["--export", "out"],
}
OF_A_SWEEP = [
    *(
        [str(command.name)]
        for command in app.registered_commands
        if command.name not in NO_SWEEP_NEEDED
    ),
    ["audit", "--files"],
    ["audit", "--reproduce"],
    ["audit", "--test"],
    ["init", "new", "--from"],
    ["list", "--sizes"],
    ["list", "--yes", "--remove"],
    ["report", "--csv", "out"],
    ["resume", "--retry"],
    ["show", "--diff", "1"],
    ["show", "--log"],
]
OLDER = "use the version that made the sweep, or run its spec again as a new sweep"


def _seal(text: str) -> bytes:
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{text}# sha256 {digest}\n".encode()


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepPaths:
    monkeypatch.chdir(tmp_path)
    return interrupted(tmp_path / "runs")


@pytest.fixture(params=["3", "none", "newer"])
def other(paths: SweepPaths, request: pytest.FixtureRequest) -> tuple[SweepPaths, str]:
    """A sweep of another format, and the sentence about it; the first format had no number."""
    written = str(request.param)
    text = paths.spec.read_text().partition("# sha256")[0]
    number, remedy = (1 if written == "none" else FORMAT + 1), "upgrade gradsweep"
    if written == "newer":
        text = f"# format {number}, revision 2, 2030-01-01T00:00:00Z\nunheard: [of\n"
        paths.spec.write_bytes(paths.spec.read_bytes() + b"---\n" + _seal(text))
    else:
        number = 1 if written == "none" else int(written)
        start = "# " if written == "none" else f"# format {number}, "
        paths.spec.write_bytes(_seal(re.sub(r"^# format \d+, ", start, text)))
        remedy = OLDER
    said = (
        f"{paths.spec} is of a sweep of format {number}; this version of gradsweep reads format "
        f"{FORMAT} alone, and has changed nothing; {remedy}"
    )
    return paths, said


def _files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("command", OF_A_SWEEP, ids=" ".join)
def test_sweep_of_another_format_is_refused_by_every_command(
    other: tuple[SweepPaths, str], command: list[str]
) -> None:
    paths, said = other
    before = _files(paths.root.parent)
    done = CliRunner().invoke(app, [*command, "chaos", *MORE.get(command[0], [])])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"{said}\n"
    assert _files(paths.root.parent) == before


def test_sweep_of_another_format_teaches_a_new_one_nothing(other: tuple[SweepPaths, str]) -> None:
    paths, said = other
    before = _files(paths.root)
    Path("s.yaml").write_text(
        "name: small\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"
        "search: {warm_start: [chaos]}\n"
    )
    done = CliRunner().invoke(app, ["run", "s.yaml"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == f"{said}\n"
    assert _files(paths.root) == before


def test_list_names_a_sweep_of_another_format_and_shows_others(
    other: tuple[SweepPaths, str],
) -> None:
    paths, said = other
    MadeSweep(paths.root, "small")
    done = CliRunner().invoke(app, ["list", "--json"])
    assert done.exit_code == 0
    assert [sweep["name"] for sweep in json.loads(done.stdout)] == ["small"]
    assert done.stderr == f"{said}\n"


def test_doctor_names_a_sweep_of_another_format(other: tuple[SweepPaths, str]) -> None:
    paths, said = other
    (finding,) = check_sweeps(paths.root)
    assert (finding.level, finding.what, finding.detail) == ("fail", "chaos", said)


def test_list_names_a_spec_of_a_newer_version(paths: SweepPaths) -> None:
    text = f"# format {FORMAT}, revision 2, 2030-01-01T00:00:00Z\nversion: 2\nunheard: 3\n"
    before = paths.spec.read_bytes() + b"---\n"
    paths.spec.write_bytes(before + _seal(text))
    line = before.count(b"\n") + 2
    done = CliRunner().invoke(app, ["list", "--json"])
    assert (done.exit_code, done.stdout) == (0, "[]\n")
    parts = (f"{paths.spec}:{line}:10: version: version 2 ", "supported: 1; upgrade gradsweep\n")
    assert_parts(done.stderr, *parts)
