"""README and docs: each code block runs, in the order of its page, in one directory per page.

What must not live here: code that a document shows, and what a single document promises beyond
that its blocks run.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from sweeps.spec.spec import parse_spec
from tests.integration.commandline import CommandLine
from tests.optional_packages import needs_imports_of
from tests.time_limits import scaled

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted(  # test_notebooks.py runs the notebooks, each in a kernel
        page for page in (ROOT / "docs").rglob("*.md") if page.parent.name != "notebooks"
    ),
]
REQUIRED = {"name": "page", "task": "digits", "metric": "val/loss", "mode": "min", "trials": 2}
"""What a fragment of a spec leaves out."""
OUTPUT = "text"
_LANGUAGES = ("python", "yaml", "sh", OUTPUT)
_NOT_RUN = re.compile(r"^[ \t]*<!-- not run:(.*?)-->[ \t]*\n", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w-]+\.(?:py|yaml))\b")
_SECONDS = 180
_EXAMPLE = "sweep run sweeps/examples/digits.yaml -s trials=2 -s budget.epochs=2\n"
"""Several pages begin with this line: it runs once, and each gets a copy of what it leaves."""


def _run_python(example: Example) -> None:
    """Execute a block, with the names of the blocks before it."""
    example.namespace["__name__"] = Path(example.path).stem
    PythonEvaluator()(example)


def _run_yaml(example: Example) -> None:
    """Parse a block as a spec, or as a part of one."""
    text = str(example.parsed)
    given = YAML(typ="safe").load(text)
    missing = [f"{key}: {value}" for key, value in REQUIRED.items() if key not in given]
    parse_spec("\n".join([*missing, text]), example.path)


def _run_sh(example: Example) -> None:
    """Run a block of commands; the first one that fails ends it."""
    line: CommandLine = example.namespace["cli"]
    source = str(example.parsed)
    if source.startswith(_EXAMPLE):
        shutil.copytree(example.namespace["finished"], line.root)
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", source.removeprefix(_EXAMPLE)],
        cwd=line.directory,
        env=line.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled(_SECONDS),
        check=False,
    )
    where = f"{example.path}:{example.line}"
    assert done.returncode == 0, f"{where}\n{done.stdout}\n{done.stderr}"


_EVALUATE = {"python": _run_python, "yaml": _run_yaml, "sh": _run_sh}


def _run(example: Example) -> None:
    """Run a block as its language says, and keep it where it names a file."""
    language, source = example.region.lexemes["arguments"], str(example.parsed)
    if named := _FILE.match(source):
        (example.namespace["cli"].directory / named[1]).write_text(source, encoding="utf-8")
    _EVALUATE[language](example)


class _Blocks(CodeBlockParser):
    """All blocks of a page but those that are output or are marked with a reason."""

    language = "any"

    def __call__(self, document: Document) -> Iterable[Region]:
        """Yield each block that is to run.

        Raises:
            ValueError: A mark has no reason or no block, or a block has no language that runs.
        """
        marks = {mark.end(): mark for mark in _NOT_RUN.finditer(document.text)}
        for region in self.lexers(document):
            mark = marks.pop(region.start, None)
            where = document.line_column(region.start)
            if mark is not None:
                if not mark[1].strip():
                    raise ValueError(f"{where}: 'not run' has no reason; write why after the ':'")
                continue
            language = region.lexemes["arguments"]
            if language not in _LANGUAGES:
                raise ValueError(
                    f"{where}: a block in {language!r} does not run; use one of "
                    f"{', '.join(_LANGUAGES)}, or write <!-- not run: REASON --> before it"
                )
            if language != OUTPUT:
                region.parsed, region.evaluator = region.lexemes["source"], _run
                yield region
        for mark in marks.values():
            where = document.line_column(mark.start())
            raise ValueError(f"{where}: no block follows 'not run'; remove the mark")


SYBIL = Sybil(parsers=[_Blocks()], patterns=["*.md"], path=str(ROOT))


def _parse(text: str) -> list[Region]:
    """Return the blocks of a page that are to run."""
    return list(_Blocks()(Document(text, "page.md")))


def _run_page(page: Path, cli: CommandLine, finished: Path) -> None:
    """Run the blocks of a page."""
    document = SYBIL.parse(page)
    document.namespace.update(cli=cli, finished=finished)
    for example in document.examples():
        example.evaluate()


@pytest.fixture(scope="module")
def finished(module_cli: CommandLine) -> Path:
    """The root with the sweep of `_EXAMPLE`."""
    shutil.copytree(ROOT / "sweeps/examples", module_cli.directory / "sweeps/examples")
    module_cli.ok(*_EXAMPLE.split()[1:])
    return module_cli.root


@pytest.fixture
def page_cli(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> Iterator[CommandLine]:
    """A directory for one page, with the examples in it, from which its modules are imported."""
    shutil.copytree(ROOT / "sweeps/examples", cli.directory / "sweeps/examples")
    monkeypatch.chdir(cli.directory)
    monkeypatch.syspath_prepend(cli.directory)
    before = set(sys.modules)
    yield cli
    for name in set(sys.modules) - before:
        if str(cli.directory) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=needs_imports_of(page.read_text("utf-8")),
            id=str(page.relative_to(ROOT)),
        )
        for page in PAGES
        if re.search(r"^[ \t]*(```|~~~|<!-- invisible)", page.read_text("utf-8"), re.MULTILINE)
    ],
)
def test_blocks_run(page: Path, page_cli: CommandLine, finished: Path) -> None:
    _run_page(page, page_cli, finished)


def test_each_fence_is_seen() -> None:
    """No block escapes because its fence has no language or is indented."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        opened = re.findall(r"^[ \t]*(?:`{3,}|~{3,})", text, re.MULTILINE)
        seen = CodeBlockParser("any").lexers(Document(text, str(page)))
        fenced = [region for region in seen if not text.startswith("<!--", region.start)]
        assert len(fenced) * 2 == len(opened), page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- not run: -->\n```sh\nls\n```\n", "no reason"),
        ("<!-- not run: needs Slurm -->\n\n```sh\nls\n```\n", "no block follows"),
        ("```console\n$ ls\n```\n", "does not run"),
    ],
)
def test_wrong_marks_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _parse(text)


def test_marked_blocks_and_output_are_left_out() -> None:
    marked = "<!-- not run: needs Slurm -->\n```sh\nsbatch\n```\n"
    text = f"{marked}\n```text\noutput\n```\n\n```sh\nls\n```\n"
    assert [str(region.parsed) for region in _parse(text)] == ["ls\n"]


@pytest.mark.parametrize(
    "text",
    ["```python\n1 / 0\n```\n", "```sh\nfalse\ntrue\n```\n", "```yaml\nlearning_rte: 1\n```\n"],
)
def test_wrong_block_fails(text: str, page_cli: CommandLine) -> None:
    page = page_cli.write("page.md", text)
    with pytest.raises((ZeroDivisionError, AssertionError, ValueError)):
        _run_page(page, page_cli, page_cli.root)
