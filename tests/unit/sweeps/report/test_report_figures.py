"""The report's figures as Plotly's objects. For their look see `test_report_page.py`."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from sweeps.report.data import SweepData, read_sweep
from sweeps.report.figures import (
    FIGURES,
    contours,
    importance,
    parallel,
    selection_note,
    slices,
)
from sweeps.spec.revisions import write_spec
from sweeps.trust.audit.read import audit_sweep
from sweeps.trust.findings import find
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep

LR, NORM = "train.optimizer.lr", "train.clip.max_norm"
SPACE = f"{{{LR}: {{loguniform: [1.0e-4, 1.0e-1]}}, {NORM}: {{loguniform: [0.1, 10]}}}}"
ASHA = "early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}"


def _points(count: int) -> list[dict[str, float]]:
    draw = random.Random(1)
    rates = [2e-4 * 250 ** ((index + 0.5) / count) for index in range(count)]
    draw.shuffle(rates)
    return [{LR: rate, NORM: 10 ** draw.uniform(-0.8, 0.8)} for rate in rates]


def misleading_sweep(root: Path, count: int = 24) -> MadeSweep:
    """The learning rate decides at epoch 1, where half of the trials are stopped.

    Among the others, which all have a good learning rate, the clipping norm decides.
    """
    sweep = MadeSweep(root, space=SPACE, more=ASHA)
    points = _points(count)
    middle = sorted(point[LR] for point in points)[count // 2]
    for point in points:
        if point[LR] < middle:
            sweep.add("pruned", 2.5 - 100 * point[LR], reason="asha at epoch 1", params=point)
        else:
            sweep.add(
                "complete", 0.5, *(point[NORM] / epoch for epoch in range(2, 11)), params=point
            )
    return sweep


def _shares(sweep: SweepData) -> dict[str, float]:
    (bars,) = importance(sweep).data
    return dict(zip(bars.y, bars.x, strict=True))


def test_importance_is_the_number_of_the_findings_and_the_audit(tmp_path: Path) -> None:
    """Among the survivors the clipping norm decides; among all trials the learning rate, too."""
    sweep = misleading_sweep(tmp_path)
    shares = _shares(read_sweep(sweep.paths))
    found = find(sweep.view)
    card = next(one for one in audit_sweep(sweep.view).cards if one.id == "effects")
    numbers = found.as_dict()["importance"]
    assert numbers == card.figure["parameters"]
    assert shares == {
        short: numbers[key]["share"] for key, short in ((LR, "lr"), (NORM, "max_norm"))
    }
    said = {one.topic: one.sentence for one in found.sentences}["importance"]
    assert said in card.evidence
    assert said.startswith(f"lr mattered most: it explains {100 * shares['lr']:.0f} % (")
    assert "of how 24 trials rank by val/loss at the end" in said


def test_narrowed_parameter_keeps_its_importance(tmp_path: Path) -> None:
    """A resume in a better space changes the distribution of the parameter that matters most."""
    sweep = misleading_sweep(tmp_path)
    narrowed = with_overrides(sweep.spec, [f"space.{LR}={{loguniform: [0.003, 0.1]}}"])
    sweep.spec = narrowed
    for rate in (0.004, 0.02):
        sweep.add("complete", 0.5, params={LR: rate, NORM: 1.0})
    write_spec(sweep.paths.spec, narrowed)
    data = read_sweep(sweep.paths)
    assert _shares(data)["lr"] > 0.6
    assert data.searched_range("lr") == (1e-4, 1e-1, True)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_few_bad_values_squash_no_axis(tmp_path: Path, mode: str) -> None:
    space = "{train.optimizer.lr: {uniform: [0.01, 1.0]}, task.layers: {int: [1, 3]}}"
    sweep = MadeSweep(tmp_path, space=space, mode=mode)
    sign = 1 if mode == "min" else -1
    values = [2.0 + 0.01 * sign * (7 * n % 32) for n in range(32)]
    for index in (3, 11):
        values[index] = 2.0 + 4 * sign
    for n, value in enumerate(values):
        params = {"train.optimizer.lr": 0.01 + n / 33, "task.layers": 1 + n % 3}
        sweep.add("complete", value, params=params)
    data = read_sweep(sweep.paths)
    low, high = data.scale or (0.0, 0.0)
    assert (low, high) == pytest.approx(sorted((2.0, 2.0 + 0.31 * sign)))
    for draw in (slices, FIGURES[0].draw, FIGURES[1].draw):
        first, last = draw(data).layout.yaxis.range
        assert low - 0.05 < first < low
        assert high < last < high + 0.05
    (lines,) = parallel(data).data
    assert tuple(lines.dimensions[0].range) == pytest.approx((low, high))
    assert "worse than that: 2 trials." in selection_note(data)
    shown = {axis.label: axis.tickvals for axis in lines.dimensions}
    assert list(shown["layers"]) == [1, 2, 3]
    assert list(slices(data).layout.xaxis.tickvals) == [1, 2, 3], "no half layers"
    surface = next(one for one in contours(data).data if one.type == "contour")
    known = [value for row in surface.z for value in row if not math.isnan(value)]
    assert low - 1e-9 <= min(known) <= max(known) <= high + 1e-9


def test_colours_are_the_numbers_and_stopped_trials_are_pale(tmp_path: Path) -> None:
    sweep = misleading_sweep(tmp_path)
    data, records = read_sweep(sweep.paths), sweep.view.records
    pale = [0.35 if record.state == "pruned" else 1.0 for record in records]
    assert pale.count(0.35) == 12
    for key, dots in zip((LR, NORM), slices(data).data, strict=True):
        assert list(dots.marker.color) == list(range(24))
        assert (dots.marker.cmin, dots.marker.cmax) == (0, 23)
        assert list(dots.marker.opacity) == pale
        assert list(dots.x) == pytest.approx([record.params[key] for record in records])
        assert list(dots.y) == pytest.approx([record.value for record in records])
    (best,) = sweep.view.ledger.front()
    (lines,) = parallel(data).data
    shades = dict(zip(lines.dimensions[-1]["values"], lines.line.color, strict=True))
    assert {number: shade == 0.0 for number, shade in shades.items()} == {
        number: opacity < 1 for number, opacity in enumerate(pale)
    }
    assert [number for number, shade in shades.items() if shade == 1.0] == [best.number]
    assert list(lines.line.color) == sorted(lines.line.color), "the best is on top"
    trained = [sweep.view.record(n).value for n in shades if shades[n] > 0]
    assert trained == sorted(trained, reverse=True)
    for dots in slices(data).data:
        assert [n for n, one in enumerate(dots.marker.symbol) if one == "star"] == [best.number]
    assert selection_note(data) == (
        "Drawn from 24 trials, each with its best val/loss; 12 of them, pale, were stopped early."
    )


def test_axes_show_the_whole_searched_range(tmp_path: Path) -> None:
    data = read_sweep(misleading_sweep(tmp_path, 32).paths)
    figure = slices(data)
    assert figure.layout.xaxis.title.text == "lr"
    low, high = figure.layout.xaxis.range
    assert figure.layout.xaxis.type == "log"
    assert low < -4 < -1 < high
    assert high - low < 3.5
    low, high = figure.layout.xaxis2.range
    assert low < -1 < 1 < high
    (area, dots) = contours(data).data[:2]
    assert area.type == "contour"
    assert list(dots.text) == [f"trial {n}" for n in range(32)]
    (lines,) = parallel(data).data
    value, rate, norm, number = lines.dimensions
    assert [one["label"] for one in lines.dimensions] == ["val/loss", "lr", "max_norm", "trial"]
    assert rate["range"] == pytest.approx((-4, -1))
    known = sorted(math.log10(t.params["lr"]) for t in data.selected)
    assert sorted(rate["values"]) == pytest.approx(known)
    assert rate["ticktext"] == (
        "0.0001",
        "0.0002",
        "0.0005",
        "0.001",
        "0.002",
        "0.005",
        "0.01",
        "0.02",
        "0.05",
        "0.1",
    )
    assert rate["tickvals"] == pytest.approx([math.log10(float(t)) for t in rate["ticktext"]])
    assert norm["range"] == pytest.approx((-1, 1))
    assert value["range"] == pytest.approx((min(value["values"]), max(value["values"])))
    assert (number["range"], sorted(number["values"])) == ((0, 31), list(range(32)))


def test_contours_place_choices_in_their_order(tmp_path: Path) -> None:
    space = (
        "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}, "
        "task.width: {choice: [16, 128, 32]}, task.model: {choice: [mlp, cnn]}}"
    )
    sweep = MadeSweep(tmp_path, space=space)
    for number in range(33):
        params = {
            LR: 10 ** -(1.5 + number % 2),
            "task.width": (16, 32, 128)[number % 3],
            "task.model": ("mlp", "cnn")[number % 2],
        }
        sweep.add("complete", 1.0 - number % 3 / 10, params=params)
    figure = contours(read_sweep(sweep.paths))
    assert figure.layout.xaxis7.title.text == "lr"
    assert figure.layout.xaxis8.title.text == "model"
    assert (figure.layout.xaxis8.range, figure.layout.xaxis8.ticktext) == (
        (-0.5, 1.5),
        ("mlp", "cnn"),
    )
    assert figure.layout.xaxis9.title.text == "width"
    assert figure.layout.xaxis9.ticktext == ("16", "32", "128")
    assert figure.layout.xaxis9.range == figure.layout.yaxis7.range == (-0.5, 2.5)
    widths = [
        trace
        for trace in figure.data
        if trace.type == "scatter" and trace.xaxis == "x3" and trace.yaxis == "y3"
    ]
    assert [set(dots.x) for dots in widths] == [{0, 1, 2}]


def test_options_and_absent_parameters_have_a_place(tmp_path: Path) -> None:
    space = (
        "{train.optimizer.name: {choice: [adamw, sgd]}, "
        "train.optimizer.momentum: {uniform: [0.5, 0.9], when: {train.optimizer.name: sgd}}}"
    )
    sweep = MadeSweep(tmp_path, space=space)
    name, momentum = "train.optimizer.name", "train.optimizer.momentum"
    sweep.add("complete", 0.4, params={name: "adamw"})
    sweep.add("complete", 0.2, params={name: "sgd", momentum: 0.7})
    sweep.add("complete", 0.3, params={name: "sgd", momentum: 0.9})
    data = read_sweep(sweep.paths)
    (lines,) = parallel(data).data
    value, option, factor, number = lines.dimensions
    assert number["values"] == (0, 2, 1)
    assert value["values"] == (0.4, 0.3, 0.2)
    assert (option["values"], option["ticktext"]) == ((0, 1, 1), ("adamw", "sgd"))
    assert factor["values"] == pytest.approx((0.46, 0.9, 0.7))
    assert factor["range"] == pytest.approx((0.46, 0.9))
    assert factor["ticktext"] == ("none", "0.5", "0.7", "0.9")
    assert factor["tickvals"] == pytest.approx((0.46, 0.5, 0.7, 0.9))
    assert slices(data).layout.xaxis2.range == (-0.5, 1.5)
