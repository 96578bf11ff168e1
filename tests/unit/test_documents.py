"""The documents: the tests that they name exist, and their tables and examples are right.

What must not live here: links (`test_document_links`), and code blocks, which
`tests/integration/test_document_blocks.py` runs.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Iterator
from operator import getitem
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from sweeps.cli import app
from sweeps.config.spec import parse_spec
from tests.chaos.fault_table import ROWS, find_tests, promised_tests
from trainable import check_task, load_task, open_trainer
from trainable.config import TrainConfig
from trainable.diagnostics import MEASURED
from trainable.metrics_file import read_rows

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
HOLES_UNTIL = {"ray": "2.56", "mlflow": "3.11", "torch": "2.10"}
"""The first releases without the holes that are known of those before."""


def test_every_test_that_the_readme_names_exists() -> None:
    sources = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "tests").rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", README))
    assert named
    assert {name for name in named if f"def {name}(" not in sources} == set()
    paths = set(re.findall(r"`((?:tests|sweeps)/[\w/]+\.(?:py|yaml))`", README))
    assert paths
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_command_is_in_the_readme() -> None:
    commands = {
        command.name or command.callback.__name__.replace("_command", "")
        for command in app.registered_commands
        if command.callback is not None
    }
    missing = {c for c in commands if f"`{c}`" not in README and f"sweep {c}" not in README}
    assert missing == set()


def test_spec_in_the_readme_is_valid() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert parse_spec(block, "README.md").name == "digits"


def test_keys_in_the_readme_have_these_defaults() -> None:
    lines = re.findall(r"^\| `train\.([\w.]+)` \| `(\w+)` \|", README, re.MULTILINE)
    assert len(lines) >= 10
    defaults = TrainConfig().model_dump(mode="json")
    for key, shown in lines:
        assert json.loads(shown) == functools.reduce(getitem, key.split("."), defaults), key


# What the reader has, for the blocks of "Bring your own".
THEIRS = """
import torch
from torch import nn

class MyNet(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))

class MyDataset(torch.utils.data.Dataset):
    def __init__(self, split):
        self.inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.inputs[index], int(self.inputs[index].sum() > 0)

def build(lr):
    model = MyNet(8)
    return model, torch.optim.AdamW(model.parameters(), lr=lr)

def train_one_epoch(model, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.randn(20, 4)), torch.randint(2, (20,)))
    loss.backward()
    optimizer.step()
    return loss.item()
"""


@pytest.fixture
def _modules_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    task, loop = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_code.py").write_text(THEIRS)
    (tmp_path / "my_task.py").write_text(task)
    (tmp_path / "my_loop.py").write_text("from my_code import build, train_one_epoch\n" + loop)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for module in ("my_code", "my_task", "my_loop"):
        sys.modules.pop(module, None)


@pytest.mark.usefixtures("_modules_of_the_readme")
@pytest.mark.parametrize("name", ["my_task:MyTask", "my_loop:run"])
def test_code_in_the_readme_trains_and_resumes(tmp_path: Path, name: str) -> None:
    text = f'{{name: own, task: "{name}", metric: val/loss, mode: min, trials: 1}}'
    config = parse_spec(text, "own.yaml").trial_config(0, {})
    asked = itertools.count(1)
    for interrupted, began, ended in ((lambda: next(asked) == 4, 0, 4), (lambda: False, 4, 10)):
        with open_trainer(
            config, tmp_path / "run", device="cpu", interrupted=interrupted
        ) as trainer:
            assert trainer.resumed_at == began
            reports = list(trainer.events())
        assert reports[-1].epoch == ended
        assert "val/loss" in reports[-1].metrics


@pytest.mark.parametrize("name", ["Averaged", "Counting", "Jittered", "Logging"])
def test_task_in_the_guide_resumes_to_the_same_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (ROOT / "docs" / "your-training.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", guide, re.DOTALL))
    assert set(re.findall(r"^class (\w+)", code, re.MULTILINE)) == {
        "Averaged",
        "Counting",
        "Jittered",
        "Logging",
    }
    (tmp_path / "guide_tasks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    text = f'{{name: own, task: "guide_tasks:{name}", metric: val/loss, mode: min, trials: 1, '
    config = parse_spec(text + "train: {batch_size: 8}}", "own.yaml").trial_config(0, {})
    rows = []
    for run, stops in (("whole", []), ("cut", [6, 17])):
        for stop in [*stops, None]:
            asked = itertools.count(1)
            interrupted = lambda asked=asked, stop=stop: next(asked) == stop  # noqa: E731
            with open_trainer(
                config, tmp_path / run, device="cpu", interrupted=interrupted
            ) as trainer:
                list(trainer.events())
        rows.append(
            [
                {k: v for k, v in row.metrics.items() if k not in MEASURED}
                for row in read_rows(tmp_path / run)
            ]
        )
    sys.modules.pop("guide_tasks", None)
    assert len(rows[0]) == 40
    assert rows[0] == rows[1]
    assert ("train/mean_loss" in rows[0][0]) == (name == "Logging")


@pytest.mark.usefixtures("_modules_of_the_readme")
def test_task_in_the_readme_keeps_the_contract() -> None:
    check_task(load_task("my_task:MyTask", {"width": 8}))


@pytest.mark.parametrize(
    "example", sorted((ROOT / "sweeps/examples").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_example_is_valid(example: Path) -> None:
    parse_spec(example.read_text(encoding="utf-8"), example.name)


def test_table_of_what_survives_what_is_that_of_the_fault_matrix() -> None:
    """Each kind of fault stands in it once, with tests of that kind or the words that there are
    none.
    """
    section = README.partition("## What survives what")[2].partition("\n## ")[0]
    lines = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", section, re.MULTILINE)
    assert [int(row) for row, _ in lines] == list(ROWS)
    tests, promised = find_tests(ROOT / "tests"), promised_tests(section)
    for row, shown in lines:
        there = set(tests.get(int(row), []))
        named = set(promised.get(int(row), []))
        assert named <= there, f"row {row}: {named - there} are no tests of that fault"
        assert bool(named) != shown.startswith("not yet"), f"row {row}: {shown}"
        assert bool(named) == bool(there), f"row {row} has the tests {sorted(there)}"


def test_nothing_is_asked_for_that_has_a_known_hole() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = [
        project["project"]["dependencies"],
        *project["project"]["optional-dependencies"].values(),
        *project["dependency-groups"].values(),
    ]
    asked = [Requirement(line) for group in groups for line in group]
    asked = [one for one in asked if one.name in HOLES_UNTIL]
    assert {one.name for one in asked} == set(HOLES_UNTIL)
    for one in asked:
        oldest = max(Version(s.version) for s in one.specifier if s.operator == ">=")
        assert oldest >= Version(HOLES_UNTIL[one.name]), str(one)
