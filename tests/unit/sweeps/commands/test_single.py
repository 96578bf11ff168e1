"""One run without Ray, as it is shown."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.commands.single import train_once
from sweeps.spec.spec import parse_spec

SPEC = "name: one\ntask: {task}\nmetric: {metric}\nmode: max\ntrials: 1\nbudget: {{epochs: 1}}\n"
TASKS = """
from trainable.tasks.spiral import Spiral

class Heard(Spiral):
    def __init__(self):
        super().__init__(samples=20)

    def evaluate(self, model, batches):
        return {**super().evaluate(model, batches), "snr": 7.5}

def loop(config, context):
    yield {"epochs_alone": 2.0, "score": 0.5}
"""


@pytest.mark.parametrize(
    ("task", "metric", "shown"),
    [
        ("loop", "score", "score 0.5, epochs_alone 2"),
        ("Heard", "val/snr", "val/snr 7.5, train/loss"),
    ],
)
def test_the_metric_is_shown_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, metric: str, shown: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", sys.path.copy())
    module = f"shown_{task.lower()}"
    (tmp_path / f"{module}.py").write_text(TASKS)
    spec = parse_spec(SPEC.format(task=f"{module}:{task}", metric=metric), "one.yaml")
    said = io.StringIO()
    train_once(spec, None, Console(file=said, width=200), Console(file=io.StringIO()))
    (line,) = (line for line in said.getvalue().splitlines() if line.startswith("epoch 1"))
    assert line.partition(": ")[2].startswith(shown)
