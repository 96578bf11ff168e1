"""Commands, flags and arguments that there are not: exit code 2, one message, nothing created."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from sweeps.cli import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FLAGS = {
    name: {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
    | {"--help"}
    for name, command in COMMANDS.items()
}
NUMBERS = {"--trial", "--top", "--port"}
PATHS = {"--root", "--dir", "--figures", "--export", "--output", "file", "directory"}
COUNT = "it must be a whole number from {0} to {1}; write for example {0}"
NAMES = [
    pytest.param(
        "",
        "the name is empty; a name becomes a directory; write for example digits",
        id="49 an empty name",
    ),
    pytest.param(
        "../x",
        "'../x' holds a path separator; a name becomes a directory of that name below the root; "
        "use --root to choose another place",
        id="49 a path for a name of a sweep",
    ),
    pytest.param(
        "x" * 300,
        f"'{'x' * 57}...' has 300 characters; a name becomes a directory and holds at most 100 "
        "bytes; choose a shorter one",
        id="49 a name of 300 characters",
    ),
    pytest.param(
        "other",
        "there is no sweep 'other' below {here}/runs; there are no sweeps there yet; if "
        "it is elsewhere, name its directory with --root DIR or SWEEP_ROOT",
        id="46 an unknown sweep",
    ),
]
NO_SUCH = "Usage: sweep {} Try 'sweep{} --help' for help. Error {}"

WORDS = [
    pytest.param(
        ["resum", "small"],
        "[OPTIONS] COMMAND [ARGS]...",
        "No such command 'resum'. Did you mean 'resume'?",
        id="54 a command that there is not",
    ),
    pytest.param(
        ["run", "s.yaml", "--nam", "x"],
        "run [OPTIONS] {FILE}",
        "No such option: --nam (Possible options: --name)",
        id="54 a flag that there is not",
    ),
    pytest.param(["run"], "run [OPTIONS] {FILE}", "Missing argument 'FILE'.", id="54 no file"),
    pytest.param(
        ["status", "a", "b"],
        "status [OPTIONS] {NAME}",
        "Got unexpected extra argument(s) (b)",
        id="54 a word too many",
    ),
    pytest.param(
        ["show", "small", "x"],
        "show [OPTIONS] {NAME} {TRIAL}",
        f"Invalid value for 'TRIAL': 'x' is not valid; {COUNT.format(0, 10**9)}",
        id="54 a number that is none",
    ),
    pytest.param(
        ["show", "small", "1.5"],
        "show [OPTIONS] {NAME} {TRIAL}",
        f"Invalid value for 'TRIAL': '1.5' is not valid; {COUNT.format(0, 10**9)}",
        id="54 a number that is not whole",
    ),
    pytest.param(
        ["stop", "small", "--trial", "-1"],
        "stop [OPTIONS] {NAME}",
        f"Invalid value for '--trial': '-1' is not valid; {COUNT.format(0, 10**9)}",
        id="54 a negative number",
    ),
    pytest.param(
        ["best", "small", "--trial", "9" * 400],
        "best [OPTIONS] {NAME}",
        f"Invalid value for '--trial': '{'9' * 57}...' is not valid; {COUNT.format(0, 10**9)}",
        id="54 a number of 400 digits",
    ),
    pytest.param(
        ["compare", "small", "--top", "0"],
        "compare [OPTIONS] {NAME}...",
        f"Invalid value for '--top': '0' is not valid; {COUNT.format(1, 10**9)}",
        id="54 none of several",
    ),
    pytest.param(
        ["ui", "--port", "65536"],
        "ui [OPTIONS] [NAME]",
        f"Invalid value for '--port': '65536' is not valid; {COUNT.format(0, 65535)}",
        id="54 a port that there is not",
    ),
    pytest.param(
        ["train", "s.yaml", "--dir", ""],
        "train [OPTIONS] {FILE}",
        "Invalid value for '--dir': '' names no file or directory; a path must not be empty (is a "
        "shell variable unset?); write one, such as . for the working directory",
        id="54 an empty path",
    ),
]


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


@pytest.mark.parametrize(("words", "usage", "message"), WORDS)
def test_the_whole_message_of_wrong_words(
    nowhere: Path, words: list[str], usage: str, message: str
) -> None:
    command = f" {words[0]}" if words[0] in COMMANDS else ""
    assert _refusal(*words) == NO_SUCH.format(usage, command, message)
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
        if not PATHS & {option.name, *option.opts}:
            continue
        if option.name in words:
            said = _refusal(name, *(words | {option.name: ""}).values())
            called = option.metavar
        else:
            said = _refusal(name, *words.values(), option.opts[0], "")
            called = option.opts[0]
        assert f"Invalid value for '{called}': '' names no file or directory;" in said
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize(("sweep", "message"), NAMES)
def test_each_command_says_what_is_wrong_with_a_name(
    nowhere: Path, sweep: str, message: str
) -> None:
    for name, command in COMMANDS.items():
        arguments = [one.name for one in command.params if one.param_type_name == "argument"]
        if not {"name", "names"} & {*arguments}:
            continue
        done = CliRunner().invoke(app, [name, sweep, *["1"] * (len(arguments) - 1)])
        said = message.format(here=nowhere)
        assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"{said}\n"), name
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
def test_a_line_with_a_flag_that_there_is_not_is_refused(
    nowhere: Path, line: tuple[list[str], str]
) -> None:
    words, wrong = line
    said = _refusal(*words)
    assert f"No such option: {wrong}" in said or "does not take a value" in said
    assert not list(nowhere.iterdir())
