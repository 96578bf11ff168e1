"""The page of metrics and tags names exactly what the code records.

What must not live here: what the values are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from sweeps.engine.provenance import provenance
from sweeps.ledger.attributes import ACCUMULATION, ORIGIN_COLUMNS
from sweeps.spec.spec import parse_spec
from trainable import open_trainer, read_rows

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/metrics-and-tags.md").read_text(encoding="utf-8")
METRICS, TAGS = PAGE.split("\n## Tags", 1)
ELSEWHERE = {
    *("memory/gpu_mb", "num_skipped_steps", "param/<key>", "report", "test/<name>"),
    *("gpu/utilization_percent", "gpu/memory_percent"),
    *("confirm/mean", "confirm/p_best", "confirm/optimism", "confirm/num_seeds"),
}
"""Metrics that need a GPU, fp16, a population, a budget in steps, or a test."""
SPEC = """
name: metrics
task: digits
metric: val/loss
mode: min
trials: 1
budget: {epochs: 1}
train: {measure_device_time: true, layer_norms_every: 5, ema: {decay: 0.9}}
"""
_TAG = re.compile(r"(?:gradsweep|checkpoint|failure)\.[a-z][a-z_]*(?:\.[a-z_]+)*")


def _rows(text: str) -> set[str]:
    """Return the names in the first cells of tables."""
    cells = re.findall(r"^\| (`.+?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def _pattern(row: str) -> re.Pattern[str]:
    """Return what matches the names that a row such as `val/<name>` stands for."""
    return re.compile(re.sub(r"<\w+>", ".+", re.escape(row)))


def _listed(name: str, rows: set[str]) -> bool:
    return any(_pattern(row).fullmatch(name) for row in rows)


def _constants(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _names_of_tags() -> set[str]:
    """Return the tags that the code has as constants."""
    files = [*(ROOT / "sweeps").rglob("*.py"), *(ROOT / "tracking").rglob("*.py")]
    prefixed = {text for file in files for text in _constants(file) if _TAG.fullmatch(text)}
    tree = ast.parse((ROOT / "sweeps/recording/tags.py").read_text(encoding="utf-8"))
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return prefixed | {
        key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
    }


class Recorded(NamedTuple):
    """What one short training run recorded."""

    metrics: set[str]
    tags: set[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """The names of what one short training run records."""
    directory = tmp_path_factory.mktemp("metrics") / "run"
    config = parse_spec(SPEC, "metrics.yaml").trial_config(0, {})
    with open_trainer(config, directory, device="cpu") as trainer:
        list(trainer.events())
        tags = {f"gradsweep.{name}" for name in trainer.resolved}
    return Recorded({name for row in read_rows(directory) for name in row.metrics}, tags)


def test_each_recorded_metric_is_on_the_page(recorded: Recorded) -> None:
    assert {name for name in recorded.metrics if not _listed(name, _rows(METRICS))} == set()


def test_each_metric_on_the_page_is_recorded(recorded: Recorded) -> None:
    rows = _rows(METRICS) - ELSEWHERE
    assert len(rows) >= 10
    assert {
        row for row in rows if not any(map(_pattern(row).fullmatch, recorded.metrics))
    } == set()


def test_each_tag_in_the_code_is_on_the_page(recorded: Recorded) -> None:
    found = {*_names_of_tags(), *provenance(), *recorded.tags}
    ours = {name for name in found if not name.startswith("mlflow.")}
    assert len(ours) >= 20
    assert {name for name in ours if not _listed(name, _rows(TAGS))} == set()


def test_each_tag_on_the_page_is_in_the_code(recorded: Recorded) -> None:
    composed = {
        f"gradsweep.{ACCUMULATION}",
        "gradsweep.version.<package>",
        *(f"gradsweep.{column}" for column in ORIGIN_COLUMNS.values()),
    }
    known = {*_names_of_tags(), *provenance(), *recorded.tags}
    files = [*(ROOT / "sweeps").rglob("*.py"), *(ROOT / "tracking").rglob("*.py")]
    known |= {text for file in files for text in _constants(file)}
    assert _rows(TAGS) - known == composed
