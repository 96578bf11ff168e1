"""Figures: that they are written, show the rows, and what they cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.curves import append_rows
from trainable import figures
from trainable.build import open_trainer
from trainable.config import TrialConfig
from trainable.store.metrics_file import Row

PNG = b"\x89PNG\r\n\x1a\n"


def _rows(**series):
    length = max(map(len, series.values()))
    return [
        Row(step + 1, 0, {key.replace("__", "/"): values[step] for key, values in series.items()})
        for step in range(length)
    ]


@pytest.fixture
def drawn(monkeypatch):
    """The figures, caught before they are written."""
    caught = []

    def keep(figure, path):
        caught.append(figure)
        return path

    monkeypatch.setattr(figures, "_save", keep)
    return caught


def _labels(axes):
    return axes.get_legend_handles_labels()[1]


def _counted(axes):
    (bars,) = axes.patches
    return sum(bars.get_data().values)


@pytest.mark.seeds("S6 histogram")
def test_norm_histogram_counts_every_step(tmp_path, drawn):
    norms = [0.5] * 30 + [2.0] * 10 + [0.1] * 60
    figures.norm_histogram(_rows(train__grad_norm=norms), tmp_path / "n.png", max_norm=1.0)
    axes = drawn[0].axes[0]
    assert _counted(axes) == 100
    assert _labels(axes) == [
        "max_norm = 1",
        "clipped: 10.0% of 100 steps",
        "clipped: 0.0% in the second half",
    ]
    assert axes.lines[0].get_xdata()[0] == 1.0


@pytest.mark.parametrize("norms", [[0.0, 0.0], [1.0], [1e-9, 1e6], [0.7, 0.8, 0.9]])
def test_norm_histogram_draws_any_range(tmp_path, norms):
    path = figures.norm_histogram(_rows(train__grad_norm=norms), tmp_path / "n.png")
    assert path.read_bytes().startswith(PNG)


@pytest.mark.parametrize("norms", [[0.0, 0.0], [0.0, 0.0, 1.0]])
def test_steps_without_a_gradient_are_counted_too(tmp_path, drawn, norms):
    figures.norm_histogram(_rows(train__grad_norm=norms), tmp_path / "n.png")
    assert _counted(drawn[0].axes[0]) == len(norms)


def test_learning_rate_figure_marks_skipped_schedule_steps(tmp_path, drawn):
    scheduled = [0.1, 0.2, 0.1]
    figures.learning_rate(_rows(train__lr=scheduled), scheduled, tmp_path / "a.png")
    figures.learning_rate(_rows(train__lr=[0.1, 0.1, 0.1]), scheduled, tmp_path / "b.png")
    figures.learning_rate(_rows(train__lr=[0.1, 0.1]), [], tmp_path / "c.png")
    assert [_labels(figure.axes[0])[-1] for figure in drawn] == [
        "applied: as scheduled at each step",
        "applied: not as scheduled at 1 of 3 steps",
        "applied",
    ]


def test_curve_is_one_line_across_the_interruption(tmp_path, drawn):
    rows = _rows(val__loss=[4.0, 3.0, 2.0, 1.0])
    figures.curve(rows, tmp_path / "c.png", metric="val/loss", resumed_at=[0, 2])
    line, mark = drawn[0].axes[0].lines
    assert list(line.get_xdata()) == [1, 2, 3, 4]
    assert list(line.get_ydata()) == [4.0, 3.0, 2.0, 1.0]
    assert list(mark.get_xdata()) == [2, 2]
    assert mark.get_label() == "interrupted; resumed after step 2"


def test_name_of_a_metric_is_no_formula(tmp_path):
    metric = r"$\loss{$"
    row = Row(1, 0, {metric: 1.0})
    assert figures.curve([row], tmp_path / "c.png", metric=metric).read_bytes().startswith(PNG)


def test_suffix_decides_the_format(tmp_path):
    path = figures.curve(_rows(val__loss=[2.0, 1.0]), tmp_path / "c.svg", metric="val/loss")
    assert "<svg" in path.read_text()


def test_median_of_a_long_run_is_sampled(tmp_path, drawn):
    values = [1.0 + step % 2 for step in range(100_000)]
    figures.curve(_rows(train__loss=values), tmp_path / "c.png", metric="train/loss")
    each, median = drawn[0].axes[0].lines
    assert len(each.get_xdata()) == 100_000
    assert len(median.get_xdata()) == 400
    assert set(median.get_ydata()) <= {1.0, 1.5, 2.0}


def test_empty_figure_is_reported(tmp_path):
    with pytest.raises(ValueError, match="no row has 'val/f1'"):
        figures.curve(_rows(val__loss=[1.0]), tmp_path / "c.png", metric="val/f1")


@pytest.mark.seeds("S25")
def test_decision_boundary_leaves_the_model_unchanged(tmp_path, drawn):
    model = nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[50.0, 0.0], [-50.0, 50.0], [-50.0, -50.0]]))
        model.bias.zero_()
    model.train()
    points = torch.tensor([[1.0, 0.0], [-0.5, 0.5], [-0.5, -0.5]]), torch.arange(3)
    figures.decision_boundary(model, tmp_path / "d.png", points=points, resolution=40)
    assert model.training
    axes = drawn[0].axes[0]
    image = axes.images[0].get_array()
    # the right edge is class 0 (blue), the upper left class 1 (orange), the lower left class 2
    assert image[20, -1].argmax() == 2
    assert image[-1, 0].argmax() == 0
    assert image[0, 0].argmax() == 1
    assert _labels(axes) == ["class 0", "class 1", "class 2"]


def _config(name, **more):
    return TrialConfig.model_validate(
        {"task": {"name": name}, "metric": "val/loss", "mode": "min", "budget": {"epochs": 2}}
        | more
    )


@pytest.mark.seeds("S25")
def test_spiral_run_gives_every_figure(tmp_path):
    config = _config("spiral", train={"schedule": {"name": "onecycle", "warmup": 0.3}})
    with open_trainer(config, tmp_path / "run", device="cpu") as trainer:
        list(trainer.events())
        written = figures.draw_run(config, trainer, tmp_path / "run", tmp_path / "figures")
    assert [path.name for path in written] == [
        "grad_norm.png",
        "learning_rate.png",
        "train_loss.png",
        "val_loss.png",
        "decision_boundary.png",
    ]
    assert all(path.read_bytes().startswith(PNG) for path in written)


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "step", "constant"])
def test_recomputed_schedule_equals_the_applied_one(tmp_path, drawn, schedule):
    config = _config("spiral", train={"schedule": {"name": schedule, "warmup": 0.2}})
    with open_trainer(config, tmp_path / "run", device="cpu") as trainer:
        list(trainer.events())
        figures.draw_run(config, trainer, tmp_path / "run", tmp_path / "figures")
    assert _labels(drawn[1].axes[0])[-1] == "applied: as scheduled at each step"


def test_custom_loop_gets_figures_of_its_rows(tmp_path):
    config = _config("sweeps.examples.plain_loop:run")
    with open_trainer(config, tmp_path / "run", device="cpu") as trainer:
        list(trainer.events())
        written = figures.draw_run(config, trainer, tmp_path / "run", tmp_path / "figures")
    assert [path.name for path in written] == ["train_loss.png", "val_loss.png"]


def test_logged_norms_and_rates_are_no_step_norms(tmp_path):
    config = _config("my_loop:run", metric="train/lr")
    metrics = {"train/grad_norm": 2.0, "train/lr": 0.1}
    append_rows(tmp_path, (Row(epoch, 0, metrics | {"epoch": epoch}) for epoch in (1, 2)))
    written = figures.draw_rows(config, tmp_path, tmp_path / "figures")
    assert [path.name for path in written] == ["train_lr.png"]


def test_metric_of_any_name_has_a_file_of_its_own(tmp_path):
    metrics = ["ü" * 245, "loss #1", "loss ?1", "a\nb", "..", "val/loss", "val_loss", "train_loss"]
    metrics += ["grad_norm", "learning_rate"]
    steps = ["train/loss", "train/lr", "train/grad_norm"]
    append_rows(tmp_path, [Row(1, 0, dict.fromkeys([*metrics, *steps], 1.0))])
    config = _config("my_loop:run", metric=metrics, mode=["min"] * len(metrics))
    written = figures.draw_rows(config, tmp_path, tmp_path / "figures")
    assert sorted(written) == sorted((tmp_path / "figures").iterdir())
    assert len(written) == len(metrics) + len(steps)
    assert not any(set("#?\n") & set(path.name) for path in written)


def test_figures_use_parameters_of_each_step(tmp_path, drawn):
    config = _config("spiral", train={"clip": {"max_norm": 1.0}})
    append_rows(tmp_path, _rows(train__grad_norm=[0.5, 2.0], train__lr=[0.1, 0.2]))
    figures.draw_rows(config, tmp_path, tmp_path / "figures", changed=True)
    histogram, rate = (figure.axes[0] for figure in drawn)
    assert (_labels(histogram), _labels(rate)) == ([], ["applied"])


def test_row_figures_need_no_task_and_no_model(tmp_path, drawn):
    config = _config("spiral", train={"schedule": {"name": "onecycle", "warmup": 0.3}})
    with open_trainer(config, tmp_path / "run", device="cpu") as trainer:
        list(trainer.events())
    (tmp_path / "run" / "resumed.json").write_text("[3]")
    gone = _config("no_such_module:Task", train=config.train.model_dump(mode="json"))
    written = figures.draw_rows(gone, tmp_path / "run", tmp_path / "figures")
    assert [path.name for path in written] == [
        "grad_norm.png",
        "learning_rate.png",
        "train_loss.png",
        "val_loss.png",
    ]
    assert _labels(drawn[1].axes[0])[-1] == "applied: as scheduled at each step"
    assert _labels(drawn[3].axes[0])[-1] == "interrupted; resumed after step 3"


def test_fp16_skipped_windows_do_not_shorten_the_schedule(tmp_path, drawn):
    config = _config("spiral", budget={"epochs": 2})
    scheduled = figures._scheduled(config, 3, 6)
    rows = [
        Row(step, 0, {"train/grad_norm": 1.0, "train/lr": scheduled[step - 1]} | more)
        for step, more in enumerate([{}, {"epoch": 1.0}, {}, {}, {"epoch": 2.0}], start=1)
    ]
    append_rows(tmp_path, rows)
    figures.draw_rows(config, tmp_path, tmp_path / "figures")
    assert _labels(drawn[1].axes[0])[-1] == "applied: as scheduled at each step"


def test_worker_answers_requests_without_torch(tmp_path):
    append_rows(tmp_path, [Row(1, 0, {"train/grad_norm": 1.0, "train/lr": 0.1})])
    config = _config("no_such_module:Task").model_dump(mode="json")
    places = {"directory": str(tmp_path), "target": str(tmp_path / "a")}
    sound = {"config": config, **places, "changed": False}
    blocked = sound | {"target": str(tmp_path / "metrics.jsonl")}
    script = (
        "import sys, trainable.figures as f\n"
        "assert 'matplotlib' not in sys.modules\n"
        "f._main()\n"
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input="".join(json.dumps(request) + "\n" for request in (sound, blocked, sound)),
        capture_output=True,
        text=True,
        check=True,
    )
    one, refused, other = map(json.loads, done.stdout.splitlines())
    names = [str(tmp_path / "a" / name) for name in ("grad_norm.png", "learning_rate.png")]
    assert one == other == {"written": names}
    assert refused["refused"].startswith("FileExistsError")
