"""Test data: closed while a run trains, and evaluated as validation data are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.errors import ConfigError, TaskError
from trainable.evaluate_test import evaluate_test
from trainable.losses import Weight, cross_entropy
from trainable.store.manifest import Generation
from trainable.store.metrics_file import CurveDamaged
from trainable.store.notes import TESTED, RecordedTest, append_tested, read_tested
from trainable.task import Batch, Data, Task

FORM: dict[str, Any] = {}
"""What the task of these tests does; a configuration cannot hold functions."""
OPENED: list[str] = []


class Unread(Dataset[tuple[Tensor, Tensor]]):
    """Counts what is asked of it."""

    def __len__(self) -> int:
        OPENED.append("length")
        return 11

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        OPENED.append("item")
        return torch.ones(5), torch.tensor(1)


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without a length or an index."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.inputs, self.targets, strict=True)


class Averaged(Task):
    """Evaluates an average of the weights, which only the task's own state has."""

    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        self.average = torch.zeros(3, 8)
        return model

    def build_data(self) -> Data:
        inputs = torch.randn(43, 5)
        targets = inputs.argmax(dim=1) % 3
        val = inputs[:13], targets[:13]
        tests: dict[str, Any] = {
            "same as val": val,
            "as a function": lambda: val,
            "as a stream": Streamed(*val),
            "a stream from a function": lambda: Streamed(*val),
            "unread": Unread(),
            "loaded by a function": lambda: OPENED.append("loaded"),
            "empty": lambda: (torch.zeros(0, 5), torch.zeros(0)),
            "unequal": (torch.zeros(3, 5), torch.zeros(2)),
            "none": None,
        }
        shift = FORM.get("shift", 0.0)
        train = inputs[13:] + shift, targets[13:]
        return Data(train, val, collate=FORM.get("collate"), test=tests[FORM["test"]])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Weight]:
        if model.training:
            weight = model[3].weight.detach()  # type: ignore[index]
            self.average = 0.9 * self.average + 0.1 * weight
        return cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module, batches: Any) -> Mapping[str, float | Tensor]:
        found = dict(super().evaluate(model, batches))
        self.log("drawn", float(torch.rand(())))
        return found | {"average": self.average.norm()}


def loop(_config: Any, _context: Any) -> Any:
    yield {"val/loss": 1.0}


@pytest.fixture(autouse=True)
def _form() -> None:
    FORM.clear()
    FORM["test"] = "same as val"
    OPENED.clear()


@pytest.fixture
def config(configure: Callable[..., TrialConfig]) -> TrialConfig:
    made = configure(epochs=3, precision="fp32", batch_size=8)
    return made.model_copy(
        update={"task": made.task.model_copy(update={"name": f"{__name__}:Averaged"})}
    )


@pytest.fixture
def train(
    config: TrialConfig, tmp_path: Path
) -> Callable[[str], tuple[Generation, dict[str, float]]]:
    """Train a run in `run/`; returns its best checkpoint and the metrics of that report."""

    def train(form: str) -> tuple[Generation, dict[str, float]]:
        FORM["test"] = form
        with open_trainer(config, tmp_path / "run", device="cpu") as trainer:
            reports = {report.step: report.metrics for report in trainer.events()}
            best = trainer.store.best()
        assert best is not None
        return best, reports[best.step]

    return train


Train = Callable[[str], tuple[Generation, dict[str, float]]]


@pytest.mark.parametrize(
    "form", ["same as val", "as a function", "as a stream", "a stream from a function"]
)
def test_same_samples_have_the_same_metrics(
    form: str, train: Train, config: TrialConfig, tmp_path: Path
) -> None:
    best, reported = train(form)
    files = sorted((tmp_path / "run").rglob("*"))
    found = evaluate_test(config, best, built=tmp_path / "run", device="cpu")
    assert found.metrics.keys() == {
        f"test/{name}" for name in ("loss", "accuracy", "average", "drawn")
    }
    for name in ("loss", "accuracy", "average"):
        assert found.metrics[f"test/{name}"] == reported[f"val/{name}"]
    assert (found.num_samples, found.epoch, found.checkpoint_step) == (13, best.epoch, best.step)
    assert (found.sha256, found.device, found.precision) == (best.sha256, "cpu", "fp32")
    again = evaluate_test(config, best, built=tmp_path / "run", device="cpu")
    assert again.metrics == found.metrics
    assert sorted((tmp_path / "run").rglob("*")) == files


@pytest.mark.parametrize("form", ["unread", "loaded by a function"])
def test_training_opens_no_test_data(form: str, train: Train) -> None:
    train(form)
    assert set(OPENED) <= {"length"}  # whether there are any


def test_cautions_about_training_are_silent(
    train: Train, config: TrialConfig, recwarn: pytest.WarningsRecorder
) -> None:
    FORM["collate"] = list  # never called for tensors
    best, _ = train("same as val")
    assert recwarn.pop(UserWarning)
    recwarn.clear()
    evaluate_test(config, best, built=None, device="cpu")
    assert not recwarn.list


def test_data_set_is_read_once(train: Train, config: TrialConfig) -> None:
    best, _ = train("unread")
    OPENED.clear()
    assert evaluate_test(config, best, built=None, device="cpu").num_samples == 11
    assert OPENED.count("item") == 11


def test_task_without_test_data_is_told_the_line(train: Train, config: TrialConfig) -> None:
    best, _ = train("none")
    with pytest.raises(ConfigError, match=r"no test data; .*test=\(inputs, targets\)\)"):
        evaluate_test(config, best, built=None, device="cpu")


@pytest.mark.parametrize("form", ["empty", "loaded by a function"])
def test_function_must_return_samples(form: str, train: Train, config: TrialConfig) -> None:
    best, _ = train(form)
    with pytest.raises(TaskError, match=r"gives as `test`: test (has no samples|is )"):
        evaluate_test(config, best, built=None, device="cpu")


def test_wrong_test_data_are_refused_before_training(train: Train) -> None:
    with pytest.raises(TaskError, match="test holds tensors of lengths"):
        train("unequal")


def test_changed_task_is_refused_unless_accepted(
    train: Train, config: TrialConfig, tmp_path: Path
) -> None:
    best, _ = train("same as val")
    before = (tmp_path / "run/built.json").read_bytes()
    FORM["shift"] = 1.0
    with pytest.raises(ConfigError, match=r"\(train: tensor 0\).*--accept-changes"):
        evaluate_test(config, best, built=tmp_path / "run", device="cpu")
    assert evaluate_test(config, best, built=None, device="cpu").metrics
    assert (tmp_path / "run/built.json").read_bytes() == before


def test_custom_loop_is_refused(train: Train, config: TrialConfig) -> None:
    best, _ = train("same as val")
    task = config.task.model_copy(update={"name": f"{__name__}:loop"})
    with pytest.raises(ConfigError, match="only the loop can evaluate"):
        evaluate_test(config.model_copy(update={"task": task}), best, built=None, device="cpu")


RECORD = RecordedTest(40, 1_700_000_000_000, {"test/loss": 0.5}, 40, 3, "ab", 13, "cpu", "fp32")


def test_records_are_kept_in_order(tmp_path: Path) -> None:
    assert read_tested(tmp_path) == []
    for step in (40, 41):
        append_tested(tmp_path, RECORD._replace(step=step))
    assert [one.row.step for one in read_tested(tmp_path)] == [40, 41]
    assert [path.name for path in tmp_path.iterdir()] == [TESTED]


@pytest.mark.parametrize("text", ["{", "[1]\n", '{"step": 1}\n', "7\n"])
def test_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / TESTED).write_text(text)
    with pytest.raises(CurveDamaged, match=r"test\.jsonl is damaged .*or remove it"):
        read_tested(tmp_path)
