"""The tasks and the loop of README and the guides train the same after an interruption.

What must not live here: that code blocks run at all, which the runner of all documents shows.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain, repeat
from pathlib import Path

import pytest

from tests.optional_packages import needs_imports_of
from trainable import TrialConfig, check_task, load_task, open_trainer, read_rows
from trainable.watch.diagnostics import MEASURED

ROOT = Path(__file__).parents[2]
_PAGES = (
    "README.md",
    "docs/guides/own-model.md",
    "docs/guides/own-loop.md",
    "docs/guides/hooks-and-logging.md",
    "docs/guides/optimizers-and-schedules.md",
    "docs/guides/data.md",
    "docs/guides/hugging-face.md",
    "docs/guides/libraries.md",
    "docs/guides/lightning.md",
    "docs/guides/trust.md",
)
_TEXTS = [(ROOT / page).read_text("utf-8") for page in _PAGES]
_BLOCKS = [
    (block, needs_imports_of(text))
    for text in _TEXTS
    for block in re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
]
_TASK = re.compile(r"^class (\w+)\((?:Lightning)?Task\)", re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\b")
TASKS = [
    pytest.param(block, name, marks=needed, id=name)
    for block, needed in _BLOCKS
    for name in _TASK.findall(block)
]
LOOPS = [
    pytest.param(block, "run", marks=needed)
    for block, needed in _BLOCKS
    if "def run(config, context)" in block
]


def _messages() -> Iterator[tuple[Path, str]]:
    """Yield the texts in the product's code that are no docstrings."""
    for package in ("redaction", "sweeps", "tracking", "trainable"):
        for file in (ROOT / package).rglob("*.py"):
            tree = ast.parse(file.read_text("utf-8"))
            plain = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
            for one in ast.walk(tree):
                is_text = isinstance(one, ast.Constant) and isinstance(one.value, str)
                if is_text and id(one) not in plain:
                    yield file, one.value


def test_messages_name_guides_by_titles_that_exist() -> None:
    """Who installed the package has no files of the documents."""
    titles = {
        page.read_text("utf-8").partition("\n")[0].removeprefix("# ")
        for page in (ROOT / "docs").rglob("*.md")
    }
    named = 0
    for file, text in _messages():
        assert "docs/" not in text, file
        for title in re.findall(r'guide "([^"]+)"', text):
            assert title in titles, file
            named += 1
    assert named > 5


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An importable file, `guide_code.py`, for one block, beside the blocks that name a file."""
    monkeypatch.syspath_prepend(tmp_path)
    for block, _ in _BLOCKS:
        if named := _FILE.match(block):
            (tmp_path / named[1]).write_text(block)
    before = set(sys.modules)
    yield tmp_path / "guide_code.py"
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def _rows(config: TrialConfig, directory: Path, stops: list[int]) -> list[dict[str, float]]:
    """Train with an interruption at each of `stops`; return the curve without measured values."""
    for stop in [*stops, None]:
        questions = chain(repeat(False, stop - 1), [True]) if stop else repeat(False)
        with open_trainer(
            config, directory, device="cpu", threads=1, should_stop=partial(next, questions)
        ) as trainer:
            list(trainer.events())
        assert stop is None or list(questions) == [], "it was to be interrupted, and was not"
    return [
        {key: value for key, value in row.metrics.items() if key not in MEASURED}
        for row in read_rows(directory)
    ]


def _config(name: str) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": f"guide_code:{name}"},
            "metric": "val/loss",
            "mode": "min",
            "budget": {"epochs": 3},
            "train": {"batch_size": 8, "schedule": {"name": "constant"}},
        }
    )


def test_tasks_and_loop_are_found() -> None:
    assert len(TASKS) >= 11
    assert len(LOOPS) == 4


@pytest.mark.parametrize(("block", "name"), TASKS)
def test_guide_task_resumes_exactly(module: Path, tmp_path: Path, block: str, name: str) -> None:
    module.write_text(block)
    whole = _rows(_config(name), tmp_path / "whole", [])
    assert "val/loss" in whole[-1]
    assert _rows(_config(name), tmp_path / "cut", [3, 5]) == whole


@pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice
@pytest.mark.parametrize(("block", "name"), LOOPS)
def test_guide_loop_resumes_exactly(module: Path, tmp_path: Path, block: str, name: str) -> None:
    module.write_text(block)
    whole = _rows(_config(name), tmp_path / "whole", [])
    assert len(whole) == 3
    assert _rows(_config(name), tmp_path / "cut", [1]) == whole


@pytest.mark.parametrize(("block", "name"), TASKS)
def test_guide_task_keeps_the_contract(module: Path, block: str, name: str) -> None:
    module.write_text(block)
    check_task(load_task(f"guide_code:{name}", {}))
