"""A Hugging Face `Trainer` as a custom loop: reports, states, pruning, and what is refused."""

from __future__ import annotations

import itertools
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.optional_packages import skip_without
from trainable import Context, TrialConfig, open_trainer, read_rows
from trainable.custom_loop import CustomLoop
from trainable.errors import CheckpointError, ConfigError
from trainable.loop_context import Opening
from trainable.watch.diagnostics import MEASURED

skip_without("transformers", "accelerate")

from transformers import Trainer, TrainerCallback  # noqa: E402

from trainable.adapters.hugging_face import reports, training_arguments  # noqa: E402

CPU = torch.device("cpu")
BY_STEPS = {
    "eval_strategy": "steps",
    "eval_steps": 3,
    "max_steps": 12,
    "logging_steps": 2,
    "save_strategy": "steps",
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 2))

    def forward(self, x, labels):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class StopsAt(TrainerCallback):
    """Fails at a step, as a user's code may."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, _args, state, _control, **_):
        if state.global_step == self.step:
            raise RuntimeError("the disk is full")


def _samples(count: int) -> list[dict[str, Any]]:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": int(row.sum() > 0)} for row in x]


def _loop(made: list[Trainer], callbacks=(), **arguments):
    def run(config, context):
        trainer = Trainer(
            Net(),
            training_arguments(
                context,
                learning_rate=config.train.optimizer.lr,
                per_device_train_batch_size=8,
                **arguments,
            ),
            train_dataset=_samples(32),
            eval_dataset=_samples(16),
            callbacks=list(callbacks),
        )
        made.append(trainer)
        yield from reports(trainer, context)

    return run


def _config(epochs: int = 4, lr: float = 0.05) -> TrialConfig:
    return TrialConfig.model_validate(
        {
            "task": {"name": "my_loop:run"},
            "metric": "val/loss",
            "mode": "min",
            "seed": 2**63 + 1,
            "budget": {"epochs": epochs},
            "train": {"optimizer": {"lr": lr}},
        }
    )


def _open(function, directory: Path, config: TrialConfig | None = None, **options) -> CustomLoop:
    stop = options.pop("should_stop", lambda: False)
    return CustomLoop(function, config or _config(), Opening(directory, CPU, **options), stop)


def _rows(directory: Path) -> list[dict[str, float]]:
    return [
        {name: value for name, value in row.metrics.items() if name not in MEASURED}
        for row in read_rows(directory)
    ]


@pytest.mark.parametrize("arguments", [{}, BY_STEPS], ids=["epochs", "steps"])
def test_killed_between_evaluations_it_ends_the_same(tmp_path, arguments):
    made: list[Trainer] = []
    with _open(_loop(made, **arguments), tmp_path / "whole") as loop:
        list(loop.events())
    with (
        pytest.raises(RuntimeError, match="disk is full"),
        _open(_loop(made, [StopsAt(7)], **arguments), tmp_path / "cut") as loop,
    ):
        list(loop.events())
    with _open(_loop(made, **arguments), tmp_path / "cut") as loop:
        assert loop.resumed_at == (2 if arguments else 1)
        list(loop.events())
    whole, _, resumed = made
    assert _rows(tmp_path / "cut") == _rows(tmp_path / "whole")
    assert {"val/loss", "train/loss", "train/lr", "train/grad_norm"} <= _rows(tmp_path / "cut")[
        -1
    ].keys()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value), name
    assert not list((tmp_path / "cut").rglob("checkpoint-*"))  # kept in the run's checkpoints


def test_pruned_trainer_stops_at_its_evaluation(tmp_path):
    made: list[Trainer] = []
    asked = itertools.count(1)
    with _open(_loop(made), tmp_path, should_stop=lambda: next(asked) == 2) as loop:
        assert len(list(loop.events())) == 2
    assert made[0].state.global_step == 8  # two epochs of four steps
    assert not [one for one in threading.enumerate() if one.name == "train"]


def test_several_data_sets_make_one_report(tmp_path):
    def several(config, context):
        trainer = Trainer(
            Net(),
            training_arguments(context, learning_rate=config.train.optimizer.lr),
            train_dataset=_samples(16),
            eval_dataset={"near": _samples(8), "far": _samples(16)},
        )
        for metrics, state in reports(trainer, context):
            yield {"val/loss": metrics["val/far_loss"], **metrics}, state

    with _open(several, tmp_path) as loop:
        list(loop.events())
    assert len(_rows(tmp_path)) == 4
    assert _rows(tmp_path)[0].keys() >= {"val/near_loss", "val/far_loss"}


def test_without_saves_it_has_no_state(tmp_path):
    with _open(_loop([], save_strategy="no"), tmp_path) as loop:
        list(loop.events())
        assert len(_rows(tmp_path)) == 4
        assert not loop.store.generations()


def test_new_learning_rate_scales_the_restored_schedule(tmp_path):
    with _open(_loop([]), tmp_path / "one") as loop:
        list(loop.events())
    (donor,) = [one for one in (tmp_path / "one" / "checkpoints").iterdir() if "3" in one.name]
    rates = []
    for lr in (0.05, 0.1):
        run = tmp_path / f"{lr}"
        with _open(_loop([]), run, _config(lr=lr), restore=donor) as loop:
            list(loop.events())
        rates.append(_rows(run)[-1]["train/lr"])
    assert rates[0] == _rows(tmp_path / "one")[-1]["train/lr"]
    assert rates[1] == pytest.approx(2 * rates[0])


REFUSED: dict[str, dict[str, Any]] = {
    "output_dir": {"output_dir": "elsewhere"},
    "eval_strategy": {"eval_strategy": "no"},
    "save_steps": {**BY_STEPS, "save_steps": 4},
    "save_only_model": {"save_only_model": True},
    "load_best_model_at_end": {"load_best_model_at_end": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "num_train_epochs": {"num_train_epochs": 3},
    "max_steps": {**BY_STEPS, "max_steps": 15},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name_what_would_not_resume(tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(ConfigError, match=name),
        _open(_loop([], **REFUSED[name]), tmp_path / "run") as loop,
    ):
        list(loop.events())


@pytest.mark.parametrize(
    "state",
    [
        {"model": torch.zeros(1)},
        {"step": 1, "learning_rate": 0.1, "files": {"../outside": torch.zeros(1).byte()}},
    ],
)
def test_refuses_the_state_of_another_loop(tmp_path, state):
    context = Context(directory=tmp_path / "run", seed=0, epochs=4, device=CPU, restored=state)
    data = _samples(8)
    arguments = training_arguments(context)
    trainer = Trainer(Net(), arguments, train_dataset=data, eval_dataset=data)
    with pytest.raises(CheckpointError):
        list(reports(trainer, context))
    assert not (tmp_path / "run" / "outside").exists()


def test_missing_package_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "trainable.adapters.hugging_face")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_it.py").write_text("import trainable.adapters.hugging_face\n")
    config = _config().model_copy(
        update={"task": _config().task.model_copy(update={"name": "needs_it:run"})}
    )
    with pytest.raises(ConfigError, match=r"pip install 'gradsweep\[hugging-face\]'"):
        open_trainer(config, tmp_path / "run", device="cpu")
