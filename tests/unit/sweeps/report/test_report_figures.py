"""The report's figures as Plotly's objects. For their look see `test_report_page.py`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sweeps.report.data import NotEnough, SweepData, read_sweep
from sweeps.report.figures import FIGURES, contours, importance, parallel, selection_note, slices
from sweeps.spec.revisions import write_spec
from sweeps.trust.audit.read import audit_sweep
from sweeps.trust.findings import find
from tests.specs import with_overrides
from tests.unit.sweeps.sweep_factory import MadeSweep

LR, NORM = "train.optimizer.lr", "train.clip.max_norm"
SPACE = f"{{{LR}: {{loguniform: [1.0e-4, 1.0e-1]}}, {NORM}: {{loguniform: [0.1, 10]}}}}"
ASHA = "early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}"
DRAW = {figure.title: figure.draw for figure in FIGURES}


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
    lines = {line.name: line.opacity for line in parallel(data).data}
    assert lines == {f"trial {number}": opacity for number, opacity in enumerate(pale)}
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
    rates = [t.params["lr"] for t in data.selected]
    places = {line.name: line.y[1] for line in parallel(data).data}
    assert min(rates) > 1e-4 * 1.5
    assert 0 < min(places.values()) < max(places.values()) < 1


def test_contours_need_thirty_trials(tmp_path: Path) -> None:
    with pytest.raises(NotEnough, match="needs 30 trials with a value, and there are 24"):
        contours(read_sweep(misleading_sweep(tmp_path).paths))


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
    heights = {line.name: tuple(line.y) for line in parallel(data).data}
    assert heights["trial 0"] == pytest.approx((1, 0, -0.1))
    assert heights["trial 1"] == pytest.approx((0, 1, 0.5))
    assert heights["trial 2"] == pytest.approx((0.5, 1, 1))
    assert slices(data).layout.xaxis2.range == (-0.5, 1.5)


def test_history_has_stopped_trials(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more=ASHA)
    for ending, loss in (("complete", 0.5), ("pruned", 0.4), ("failed", 0.1), ("complete", 0.6)):
        sweep.add(ending, loss)
    traces = {trace.name: trace for trace in DRAW["History"](read_sweep(sweep.paths)).data}
    assert (traces["pruned"].x, traces["pruned"].y) == ((1,), (0.4,))
    assert (traces["complete"].x, traces["complete"].y) == ((0, 3), (0.5, 0.6))
    best = traces["best so far"]
    assert (best.x, best.y) == ((0, 1, 3), (0.5, 0.4, 0.4))


def test_timeline_shows_times_states_and_attempts(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path, more=ASHA)
    for _ in range(2):
        number = sweep.add("pruned", 0.4, reason="asha at epoch 1: <slow>")
    sweep.add(None, 0.5)
    number = sweep.add(None, 0.5)
    sweep.ledger.start(number)
    sweep.ledger.start(number)
    sweep.ledger.finish(number, "complete")
    data = read_sweep(sweep.paths)
    traces: dict[str, Any] = {trace.name: trace for trace in DRAW["Timeline"](data).data}
    assert set(traces) == {"pruned", "complete"}, "trial 2 neither ended nor logged"
    assert traces["pruned"].y == (0, 1)
    assert traces["complete"].y == (3,)
    assert traces["complete"].text == ("2 attempts",)
    assert "&lt;slow&gt;" in traces["pruned"].hovertext[0]
    record = data.view.records[3]
    assert record.ended_at is not None
    seconds = (record.ended_at - data.starts[3]).total_seconds()
    assert traces["complete"].x[0] == pytest.approx(1000 * seconds)
    assert traces["complete"].base[0].startswith(data.starts[3].isoformat(timespec="seconds"))
