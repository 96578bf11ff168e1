"""The small language model: its data, its predictions, and its causal mask."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from sweeps.spec.spec import load_with_positions
from trainable.config import BudgetConfig
from trainable.errors import ConfigError
from trainable.find_task import load_task
from trainable.tasks.char_lm import read_text

SMALL = {"context": 16, "layers": 2, "heads": 2, "width": 16, "text_bytes": 20_000}


def test_text_is_source_code_and_always_the_same():
    text = read_text(5_000)
    assert len(text) == 5_000
    assert text == read_text(5_000)
    assert b"import" in read_text(50_000)


def test_targets_are_the_bytes_that_follow():
    data = load_task("char_lm", SMALL).build_data()
    inputs, targets = data.train
    assert inputs.shape == targets.shape
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = torch.tensor(list(read_text(20_000)))
    assert torch.equal(inputs.flatten(), text[: inputs.numel()])
    # the held-out end begins where training stops, so no byte is in both
    assert torch.equal(data.val[0][0], text[18_000 : 18_000 + 16])
    assert inputs.numel() + 1 <= 18_000


def test_prediction_depends_on_the_past_alone():
    task = load_task("char_lm", SMALL)
    model = task.build_model()
    tokens = task.build_data().train[0][:1]
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    one, other = model(tokens), model(changed)
    assert one.shape == (1, 16, 256)
    assert torch.equal(one[0, :9], other[0, :9])
    assert not torch.equal(one[0, 9:], other[0, 9:])


def test_untrained_model_is_as_good_as_guessing():
    task = load_task("char_lm", SMALL)
    torch.manual_seed(0)
    model = task.build_model()
    batch = tuple(tensor[:8] for tensor in task.build_data().val)
    loss, weight = task.loss(model, batch)
    assert weight == 8 * 16
    assert (loss / weight).item() == pytest.approx(math.log(256), rel=0.02)


def test_evaluation_counts_every_byte():
    task = load_task("char_lm", SMALL)
    model = task.build_model()
    inputs, targets = (tensor[:5] for tensor in task.build_data().val)
    parts = [(inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    with torch.inference_mode():
        metrics = task.evaluate(model, parts)
        loss, weight = task.loss(model, (inputs, targets))
    assert float(metrics["loss"]) == pytest.approx(float(loss / weight), rel=1e-5)
    assert float(metrics["bits_per_byte"]) == pytest.approx(float(loss / weight) / math.log(2))
    hits = (model(inputs).argmax(-1) == targets).float().mean()
    assert float(metrics["accuracy"]) == pytest.approx(float(hits))


@pytest.fixture
def example():
    """The spec that ships."""
    return load_with_positions(Path(str(files("sweeps.examples"))) / "char_lm.yaml")[0]


@pytest.mark.seeds("S26")
def test_example_uses_usual_transformer_settings(example):
    train = example.train
    assert train.optimizer.name == "adamw"
    assert train.optimizer.betas == (0.9, 0.95)
    assert isinstance(train.schedule.warmup, float)
    assert 0.01 <= train.schedule.warmup <= 0.02
    assert train.clip.max_norm == 1.0


@pytest.mark.seeds("S26")
def test_example_training_beats_letter_frequencies(tmp_path, opened, example):
    task = load_task("char_lm", SMALL | {"text_bytes": 60_000})
    # a model an eighth as wide, for two epochs: at a learning rate that the space holds
    config = example.trial_config(0, {"train.optimizer.lr": 5e-3})
    config = config.model_copy(update={"budget": BudgetConfig(epochs=2)})
    counts = torch.tensor(list(read_text(60_000))).bincount().float()
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * share.log()).sum().item()
    metrics = list(opened(config, tmp_path, task).events())[-1].metrics
    assert metrics["val/loss"] < 0.95 * entropy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"context": 0}, "context is 0"),
        ({"width": 30}, "positive multiple of heads"),
        ({"val_fraction": 0.0}, "between 0 and 1"),
        ({"text_bytes": 1_000}, "must be at least 1290"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_task("char_lm", arguments)


def test_too_short_text_is_reported():
    long = load_task("char_lm", SMALL | {"text_bytes": 10**9})
    with pytest.raises(ConfigError, match=r"text_bytes is 1000000000, and the modules in .* hold"):
        long.build_data()
