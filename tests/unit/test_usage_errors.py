"""Unknown commands, flags and arguments: exit code 2, one message, no files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sweeps.cli.app import app
from tests.golden.messages import compare_messages

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FLAGS = {
    name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    | {"--help"}
    for name, command in COMMANDS.items()
}
NUMBERS = {"--trial", "--diff", "--top", "--port"}
PATHS = {"--root", "--dir", "--figures", "--export", "--output", "--csv", "--parquet"}
PATHS |= {"file", "directory"}
COUNT = "it must be a whole number from {0} to {1}; write for example {0}"
NAMES = [
    pytest.param(
        "",
        ["the name is empty;", "; write for example digits"],
        id="49 an empty name",
    ),
    pytest.param(
        "../x",
        ["'../x' holds a path separator;", "; use --root to choose another place"],
        id="49 a path for a name of a sweep",
    ),
    pytest.param(
        "x" * 300,
        [f"'{'x' * 57}...' has 300 characters;", " 100 bytes; choose a shorter one"],
        id="49 a name of 300 characters",
    ),
    pytest.param(
        "other",
        ["there is no sweep 'other' below {here}/runs;", " --root DIR or SWEEP_ROOT"],
        id="46 an unknown sweep",
    ),
]

WORDS = {
    "54 a command that there is not": ["resum", "small"],
    "54 a flag that there is not": ["run", "s.yaml", "--nam", "x"],
    "54 no file": ["run"],
    "54 a word too many": ["status", "a", "b"],
    "54 a number that is none": ["show", "small", "x"],
    "54 a number that is not whole": ["show", "small", "1.5"],
    "54 a negative number": ["stop", "small", "--trial", "-1"],
    "54 a number of 400 digits": ["best", "small", "9" * 400],
    "54 none of several": ["compare", "small", "--top", "0"],
    "54 a port that there is not": ["ui", "--port", "65536"],
    "54 an empty path": ["train", "s.yaml", "--dir", ""],
}


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _refusal(*words: str) -> str:
    """Run a command that must be refused; return what it says, without the frame around it."""
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert isinstance(done.exception, SystemExit)
    return " ".join(re.sub(r"[╭╮╰╯│─]", " ", done.stderr).split())


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_message_of_each_usage_error(
    request: pytest.FixtureRequest, nowhere: Path, words: list[str]
) -> None:
    compare_messages(request, [_refusal(*words)])
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_counts_its_arguments(nowhere: Path, name: str) -> None:
    arguments = [one for one in COMMANDS[name].params if one.param_type_name == "argument"]
    if any(one.required for one in arguments):
        assert f"Missing argument '{arguments[0].metavar}'." in _refusal(name)
    if not any(one.nargs == -1 for one in arguments):
        words = ["1"] * len(arguments)
        assert "Got unexpected extra argument(s) (b)" in _refusal(name, *words, "b")
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_flag_is_spelt_and_has_its_value(nowhere: Path, name: str) -> None:
    params = COMMANDS[name].params
    words = ["1" for one in params if one.param_type_name == "argument"]
    for option in params:
        if option.param_type_name == "argument":
            continue
        for flag in (*option.opts, *option.secondary_opts):
            wrong = f"{flag}q" if flag.startswith("--") else "-q"
            assert f"No such option: {wrong}" in _refusal(name, *words, wrong)
            if not option.is_flag:
                assert f"Option '{flag}' requires an argument." in _refusal(name, *words, flag)
            if flag in NUMBERS:
                assert f"Invalid value for '{flag}':" in _refusal(name, *words, flag, "x")
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize("name", COMMANDS)
def test_no_path_is_empty(nowhere: Path, name: str) -> None:
    params = COMMANDS[name].params
    words = {one.name: "1" for one in params if one.param_type_name == "argument"}
    for option in params:
        if not PATHS & {option.name, *option.opts} or getattr(option, "is_flag", False):
            continue
        if option.name in words:
            said = _refusal(name, *(words | {option.name: ""}).values())
            called = option.metavar
        else:
            said = _refusal(name, *words.values(), option.opts[0], "")
            called = option.opts[0]
        assert f"Invalid value for '{called}': '' names no file or directory;" in said
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize(("sweep", "parts"), NAMES)
def test_each_command_names_what_is_wrong_with_a_name(
    nowhere: Path, sweep: str, parts: list[str]
) -> None:
    for name, command in COMMANDS.items():
        arguments = [one.name for one in command.params if one.param_type_name == "argument"]
        if not {"name", "names"} & {*arguments}:
            continue
        done = CliRunner().invoke(app, [name, sweep, *["1"] * (len(arguments) - 1)])
        assert (done.exit_code, done.stdout) == (2, ""), name
        assert done.stderr.startswith(parts[0].format(here=nowhere)), name
        assert done.stderr.endswith(f"{parts[1]}\n"), name
    assert not list(nowhere.iterdir())


@st.composite
def lines_with_a_flag_that_there_is_not(draw: st.DrawFn) -> tuple[list[str], str]:
    """A command with flags and words of its own, in any order, and one flag that it has not."""
    name = draw(st.sampled_from(sorted(COMMANDS)))
    known = sorted(FLAGS[name] - {"--help"})
    unknown = st.from_regex(r"--[a-z][a-z-]{0,9}(=[^\x00]{0,4})?", fullmatch=True)
    wrong = draw(unknown.filter(lambda flag: flag.partition("=")[0] not in FLAGS[name]))
    # No value for a flag could be the wrong one, which it would swallow.
    words = draw(st.lists(st.sampled_from(["small", "x", *map("{}=1".format, known)]), max_size=4))
    return [name, wrong, *words], wrong.partition("=")[0]


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(lines_with_a_flag_that_there_is_not())
def test_unknown_flag_is_refused(nowhere: Path, line: tuple[list[str], str]) -> None:
    words, wrong = line
    said = _refusal(*words)
    assert f"No such option: {wrong}" in said or "does not take a value" in said
    assert not list(nowhere.iterdir())
