"""Random command lines: each is accepted or refused with a message.

What a command then starts (a sweep, a server, a drawing) is not started here.
"""

from __future__ import annotations

import string
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.unit.sweeps.interrupted_sweep import interrupted

SPEC = "name: digits\ntask: digits\nmetric: val/loss\nmode: min\nspace: {}\ntrials: 1\n"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
STARTED = (  # each by the module that calls it
    "sweeps.trust.plan.TaskInspector",
    "sweeps.run.launch.TaskInspector",
    "sweeps.cli.train.TaskInspector",
    "sweeps.run.launch.attempt",
    "sweeps.run.stop_requests.stop_sweep",
    "sweeps.artifacts.export.export_best",
    "sweeps.artifacts.export.register_best",
    "sweeps.artifacts.export.draw_report",
    "sweeps.run.sync.deliver",
    "sweeps.run.removal.remove",
    "sweeps.run.ui.serve",
    "sweeps.cli.train.train_once",
    "sweeps.trust.evaluation.evaluate_trial",
    "sweeps.run.doctor.examine",
    "sweeps.trust.reproduction.reproduce",
    "sweeps.trust.verification.verify",
)
ODD = (
    *("", " ", "-", "--", "-1", "0", "1", "1.5", "nan", "inf", "1e400", "9" * 400, "x" * 300),
    *("30s", "0s", "-30s", "9999999999h", "5000", "chaos", "other", "s.yaml", "runs", "null", "~"),
    *(".", "..", "../..", "a/b", "a/", "s.yaml/x", "/dev/null", "/dev/null/x", "/proc/self/x"),
    *("http://", "http://[", "https://u:p@127.0.0.1:1/x", "127.0.0.1:1", ":", "auto", "ray://x"),
    *("sqlite:///x.db", "sqlite://", "postgresql://", "s3://", "file:", "x://y", "${HOME}", "${"),
    *("trials=2", "trials", "=", "a.b=1", "space={", "-s", "name=\x1b[31m", "a\nb", "[red]x[/]"),
    *("\udcff\udc80", "\u202e", "\ufeff", "é", "\x7f", "name: [", "[/]"),
)
WORDS = st.one_of(
    st.sampled_from(ODD),
    # bytes of a terminal that are no UTF-8 come as surrogates; no argument holds a NUL
    st.text(st.characters(exclude_characters="\x00/"), max_size=12),
    st.text(string.printable.replace("/", ""), max_size=12),
)


class Started(Exception):
    """A command has read all its words, and begins."""


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command with a word wherever it takes one: most of them sound, one or more of them any."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    sound = {"name": "chaos", "names": "chaos", "file": "s.yaml", "trial": "0", "directory": "new"}
    sound |= {"trials": "0"}
    words = [name]
    for one in COMMANDS[name].params:
        word = draw(WORDS)
        if one.param_type_name == "argument":
            words.append(sound[one.name] if draw(st.booleans()) else word)
        elif one.is_flag:
            words += [one.opts[0]] if draw(st.integers(0, 4)) == 0 else []
        elif draw(st.integers(0, 2)) == 0:
            words.append(f"{one.opts[-1]}={word}")
    return words


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a sweep and a spec, where nothing is started."""
    here = tmp_path / "a" / "b" / "c"  # `..` stays within the test's own
    here.mkdir(parents=True)
    interrupted(here / "runs")
    (here / "s.yaml").write_text(SPEC)
    monkeypatch.chdir(here)

    def start(*_: Any, **__: Any) -> Any:
        raise Started

    def escape(*_: Any, **__: Any) -> Any:
        raise AssertionError("a command starts a process")

    for target in STARTED:
        monkeypatch.setattr(target, start)
    monkeypatch.setattr(subprocess.Popen, "__init__", escape)
    return tmp_path


def _files(here: Path) -> list[Path]:
    # SQLite's own files come and go beside a database that is looked at.
    return sorted(path for path in here.rglob("*") if not path.name.endswith(("-shm", "-wal")))


def _check(here: Path, words: list[str]) -> None:
    before = _files(here)
    done = CliRunner().invoke(app, words)
    said = f"{words}: {done.exit_code} {done.exception!r}\n{done.output}"
    event(f"{words[0]} {done.exit_code} {type(done.exception).__name__}")
    if isinstance(done.exception, Started):
        return
    assert done.exception is None or isinstance(done.exception, SystemExit), said
    # A model that cannot be registered is an action that failed.
    failed = {1} if any(word.startswith("--register") for word in words) else set()
    assert done.exit_code in {0, 2, 3} | failed, said
    if "Usage:" not in done.stderr:  # whose frame Typer prints
        assert done.output.replace("\n", "").isprintable(), said
    if done.exit_code:
        assert done.stderr, said
        assert not done.stdout, said
        assert _files(here) == before, said


FEW = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FEW
@given(lines())
def test_any_line_is_accepted_or_refused_in_a_sentence(here: Path, words: list[str]) -> None:
    _check(here, words)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@settings(FEW, max_examples=5000)
@given(lines())
def test_five_thousand_lines_are_accepted_or_refused(here: Path, words: list[str]) -> None:
    _check(here, words)
