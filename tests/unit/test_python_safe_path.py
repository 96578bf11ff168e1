"""Every start of Python has `-P`: no child imports from the working directory.

The sources are read, not run. What must not live here: what the commands do in a directory with
planted modules (`tests/integration/test_module_shadowing.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    file
    for name in ("sweeps", "tracking", "trainable", "redaction")
    for file in (ROOT / name).rglob("*.py")
]
_EXEC = ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")
STARTING = {
    "subprocess": {
        *("run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    },
    "os": {
        *("system", "popen", "posix_spawn", "posix_spawnp"),
        *(f"{verb}{kind}" for verb in ("exec", "spawn") for kind in _EXEC),
    },
    "multiprocessing": {"Process", "Pool", "get_context", "Manager"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "futures": {"ProcessPoolExecutor"},
    "pty": {"spawn"},
}
"""Functions that start a process, by the last name of their module."""
KNOWN = {
    ("sweeps/engine/provenance.py", "['git', '--no-optional-locks', *arguments]"): "no Python",
    ("sweeps/engine/node_notice.py", "['sh', '-c', command]"): "the user's `preemption.command`",
    (
        "trainable/processes/attempt_process.py",
        "command",
    ): "of `template_command`, which is looked at here",
}


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def starts(source: str) -> Iterator[ast.Call]:
    """Yield the calls that start a process, by whatever name the function was imported."""
    if not any(module in source for module in STARTING):
        return
    tree = ast.parse(source)
    called = {f"{module}.{name}" for module, names in STARTING.items() for name in names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = STARTING.get(node.module.split(".")[-1], set())
            called |= {one.asname or one.name for one in node.names if one.name in names}
        elif isinstance(node, ast.Import):
            for one in node.names:
                for name in STARTING.get(one.name.split(".")[-1], ()):
                    called.add(f"{one.asname or one.name}.{name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _dotted(node.func) in called:
            yield node


def command_of(call: ast.Call) -> ast.expr | None:
    """The list that a call starts; None where it is none."""
    place = 1 if _dotted(call.func).startswith("os.") else 0
    given = [one.value for one in call.keywords if one.arg in ("args", "argv")]
    return given[0] if given else call.args[place] if len(call.args) > place else None


def pythons(source: str) -> Iterator[ast.List | ast.Tuple]:
    """Yield the lists in which Python is the program of a command."""
    if "sys.executable" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.List | ast.Tuple) and "sys.executable" in map(_dotted, node.elts):
            yield node


def is_safe(command: ast.List | ast.Tuple) -> bool:
    """Whether Python's first option is `-P`."""
    words = list(map(ast.unparse, command.elts))
    return words[words.index("sys.executable") + 1 :][:1] == ["'-P'"]


def unsafe_starts(source: str, name: str) -> Iterator[str]:
    """Yield what starts a Python without `-P`, or starts something that is not known."""
    yield from (ast.unparse(one) for one in pythons(source) if not is_safe(one))
    for call in starts(source):
        command = command_of(call)
        text = "" if command is None else ast.unparse(command)
        if "sys.executable" not in text and (name, text) not in KNOWN:
            yield f"line {call.lineno}: {text}"


def test_each_started_python_has_the_safe_path_option() -> None:
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in SOURCES}
    assert len(sources) > 200
    found = {name: bad for name, one in sources.items() if (bad := [*unsafe_starts(one, name)])}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'mlflow'])",
        "import sys\ncommand = [sys.executable, '-c', 'import mlflow']",
        "import sys\ncommand = ['nice', sys.executable, '-m', '-P']",
    ],
)
def test_python_without_the_option_is_found(source: str) -> None:
    assert not all(map(is_safe, pythons(source)))


@pytest.mark.parametrize(
    "source",
    [
        "from subprocess import Popen as start\nstart(['python', 'x.py'])",
        "import subprocess as s\ns.check_call(command)",
        "import os\nos.execvp('python', ['python'])",
        "from multiprocessing import get_context\nget_context('spawn')",
        "from concurrent import futures\nfutures.ProcessPoolExecutor()",
        "import concurrent.futures\nconcurrent.futures.ProcessPoolExecutor()",
    ],
)
def test_each_start_of_a_process_is_found(source: str) -> None:
    assert len(list(starts(source))) == 1


def test_no_exception_is_unused() -> None:
    there = {
        (name, ast.unparse(command))
        for name in {name for name, _ in KNOWN}
        for call in starts((ROOT / name).read_text(encoding="utf-8"))
        if (command := command_of(call)) is not None
    }
    assert set(KNOWN) <= there
