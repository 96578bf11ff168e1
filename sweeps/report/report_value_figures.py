"""The report's figures of a metric over the searched parameters.

Each compares trials at one epoch (`SweepData.compared`), over the whole searched range. What must
not live here: the order of the figures on the page (`report_figures`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optuna
import plotly.graph_objects as go
from optuna import visualization
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from plotly.colors import sample_colorscale, sequential
from plotly.subplots import make_subplots

from sweeps.formatting import format_number, format_value
from sweeps.report import report_data
from sweeps.report.report_data import NotEnough, SweepData, spans_decades, thinned

_VISIBLE_BLUES = sequential.Blues[4:]
"""Optuna's colour scale without its lightest shades, which are invisible on white."""
_PREFERRED = ("train.optimizer.lr", "train.schedule.warmup", "train.clip.max_norm")
MAX_AXES = 3
"""The most parameters of the contours (a plot for each pair) and metrics of the Pareto front."""
_SLICES = 3
"""Slices beside each other."""
_FEWEST_FOR_CONTOURS = 30
_PADDING = 0.04
"""The part of a range that an axis shows beyond its ends, so that dots there are whole."""
_NONE = "none"


def selection_note(sweep: SweepData) -> str:
    """Return a sentence about the trials from which a figure is drawn."""
    return sweep.compared.trials.sentence


def sampled_note(sweep: SweepData) -> str:
    """Return the same for a figure with a limited number of trials."""
    most = report_data.MAX_TRIALS
    if len(sweep.compared.selected) <= most:
        return selection_note(sweep)
    return f"{selection_note(sweep)} At most {most} of these are used, evenly spaced."


def _sampled_study(sweep: SweepData) -> optuna.Study:
    """Return the study with a limited number of complete trials, each under its own number."""
    study, selected = sweep.compared.study, sweep.compared.selected
    if len(selected) <= report_data.MAX_TRIALS:
        return study
    kept = {trial.number for trial in thinned(selected, report_data.MAX_TRIALS)}
    left_out = create_trial(state=TrialState.FAIL)
    sample = optuna.create_study(direction=study.direction)
    sample.add_trials([t if t.number in kept else left_out for t in study.trials])
    return sample


def _require_trials(sweep: SweepData, at_least: int) -> None:
    found = len(sweep.compared.selected)
    if found < at_least:
        raise NotEnough(f"it needs {at_least} trials with a value, and there are {found}")


def _axes(sweep: SweepData) -> list[str]:
    """Return the parameters that have more than one value, the usual ones first."""
    keys = [*(k for k in _PREFERRED if k in sweep.names), *sweep.names]
    names = dict.fromkeys(sweep.names[key] for key in keys)
    found = {name: {repr(t.params.get(name)) for t in sweep.compared.selected} for name in names}
    axes = [name for name, values in found.items() if len(values) > 1]
    if not axes:
        raise NotEnough("these trials do not differ in any parameter")
    return axes


def axis_range(sweep: SweepData, name: str) -> list[float] | None:
    """Return the range of a Plotly axis that shows the whole searched range."""
    choices = [d for d in sweep.distributions(name) if isinstance(d, CategoricalDistribution)]
    if choices:
        # Plotly counts categories from 0; Optuna lists those of the first trial.
        return [-0.5, len(choices[0].choices) - 0.5]
    found = sweep.searched_range(name)
    if found is None or found[0] == found[1]:
        return None
    low, high, log = found
    ends = (math.log10(low), math.log10(high)) if log else (low, high)
    padding = _PADDING * (ends[1] - ends[0])
    return [ends[0] - padding, ends[1] + padding]


def slices(sweep: SweepData) -> go.Figure:
    """Draw the value over each parameter, three beside each other."""
    _require_trials(sweep, 2)
    axes = sorted(_axes(sweep))
    rows, columns = math.ceil(len(axes) / _SLICES), min(len(axes), _SLICES)
    figure = make_subplots(rows, columns, shared_yaxes="all", vertical_spacing=0.28 / rows)
    target = sweep.compared.trials.target
    for index, name in enumerate(axes):
        # One by one, as Optuna draws all of them in one row, which is too wide for a page.
        one = visualization.plot_slice(sweep.compared.study, params=[name], target_name=target)
        row, column = index // _SLICES + 1, index % _SLICES + 1
        figure.add_trace(one.data[0].update(marker={"showscale": index == 0}), row, column)
        shown = one.layout.xaxis.to_plotly_json()
        figure.update_xaxes(**{**shown, "range": axis_range(sweep, name)}, row=row, col=column)
        if column == 1:
            figure.update_yaxes(title=target, row=row, col=column)
    last = max(1, len(sweep.view.records) - 1)
    figure.update_traces(
        marker={"size": 8, "colorscale": _VISIBLE_BLUES, "cmin": 0, "cmax": last},
        hovertemplate="trial %{marker.color}<br>%{x}: %{y:.4g}<extra></extra>",
    )
    if spans_decades(sweep.compared.trials.values.values()):
        figure.update_yaxes(type="log")
    return figure.update_layout(height=160 + 290 * rows)


def contours(sweep: SweepData) -> go.Figure:
    """Draw the value over each pair of parameters."""
    _require_trials(sweep, _FEWEST_FOR_CONTOURS)
    axes = sorted(_axes(sweep)[:MAX_AXES])
    if len(axes) < 2:
        raise NotEnough("these trials differ in only one parameter")
    study = _sampled_study(sweep)
    figure = visualization.plot_contour(
        study, params=axes, target_name=sweep.compared.trials.target
    )
    numbers = [f"trial {t.number}" for t in study.trials if t.state == TrialState.COMPLETE]
    for trace in figure.data:
        if trace.type == "scatter" and trace.x is not None and len(trace.x) == len(numbers):
            trace.text = numbers  # else some trials lack one of the two parameters
    if len(axes) == 2:
        figure.update_xaxes(range=axis_range(sweep, axes[0]))
        figure.update_yaxes(range=axis_range(sweep, axes[1]))
        return figure.update_layout(height=480)
    for place, name in enumerate(axes, start=1):
        figure.update_xaxes(range=axis_range(sweep, name), col=place)
        figure.update_yaxes(range=axis_range(sweep, name), row=place)
    return figure.update_layout(height=820)


def importance(sweep: SweepData) -> go.Figure:
    """Draw how much of the value's variance each parameter explains."""
    _require_trials(sweep, 4)
    selected = sweep.compared.selected
    if len({t.value for t in selected}) < 2:
        raise NotEnough("these trials do not differ in their value")
    # Conditions and edits of the space give trials different parameters or distributions.
    first = selected[0].distributions
    axes = [
        name
        for name in _axes(sweep)
        if name in first and all(t.distributions.get(name) == first[name] for t in selected)
    ]
    if not axes:
        raise NotEnough(
            "there is no parameter that all of these trials drew from one distribution"
        )
    figure = visualization.plot_param_importances(
        _sampled_study(sweep),
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
        params=axes,
        target_name=sweep.compared.trials.target,
    )
    figure.update_xaxes(title="share of the variance", range=[0, 1.08], tickformat=".0%")
    figure.update_yaxes(title=None)
    figure.update_traces(texttemplate="%{x:.0%}")
    return figure.update_layout(height=160 + 50 * len(axes))


class _Axis(NamedTuple):
    """One axis of the parallel coordinates."""

    label: str
    place: Callable[[Any], float]
    """Returns where on the axis a value lies, from 0 to 1."""
    ticks: Sequence[tuple[float, str]]


def parallel(sweep: SweepData) -> go.Figure:
    """Draw each trial as a line from its value to its parameters.

    Optuna's figure is not used: its axes end at the lowest and highest value of a trial.
    """
    _require_trials(sweep, 2)
    study, names = _sampled_study(sweep), _axes(sweep)
    values = {t.number: t.value for t in study.trials if t.value is not None}
    value_axis = _number_axis(
        sweep.compared.trials.target,
        min(values.values()),
        max(values.values()),
        log=spans_decades(values.values()),
    )
    axes = [value_axis, *(_parameter_axis(sweep, name) for name in names)]
    minimize = sweep.view.ledger.minimize
    figure = go.Figure()
    # The best is on top.
    for number in sorted(values, key=values.__getitem__, reverse=minimize):
        trial = study.trials[number]
        params = [trial.params.get(name) for name in names]
        points = [values[number], *params]
        known = [True, *(name in trial.params for name in names)]
        heights = [a.place(p) if k else -0.1 for a, p, k in zip(axes, points, known, strict=True)]
        shade = 1 - heights[0] if minimize else heights[0]
        (colour,) = sample_colorscale(_VISIBLE_BLUES, [shade])
        shown = [
            f"{a.label} {format_value(p) if k else _NONE}"
            for a, p, k in zip(axes, points, known, strict=True)
        ]
        figure.add_trace(
            go.Scatter(
                x=list(range(len(axes))),
                y=heights,
                mode="lines",
                line={"color": colour, "width": 1.5},
                name=f"trial {trial.number}",
                text=["<br>".join([f"trial {trial.number}", *shown])] * len(axes),
                hovertemplate="%{text}<extra></extra>",
                showlegend=False,
            )
        )
    missing = any(name not in study.trials[n].params for n in values for name in names)
    return figure.update_layout(**_parallel_layout(axes, missing=missing))


def _parallel_layout(axes: Sequence[_Axis], *, missing: bool) -> dict[str, Any]:
    line = {"type": "line", "y0": 0, "y1": 1, "line": {"color": "#888"}, "layer": "below"}
    ticks = [(place, height, text) for place, a in enumerate(axes) for height, text in a.ticks]
    if missing:
        ticks += [(place, -0.1, _NONE) for place in range(1, len(axes))]
    tick = {"showarrow": False, "xanchor": "right", "xshift": -6, "font": {"size": 11}}
    return {
        "xaxis": {
            "tickvals": list(range(len(axes))),
            "ticktext": [axis.label for axis in axes],
            "range": [-0.35, len(axes) - 0.85],
            "showgrid": False,
            "zeroline": False,
        },
        "yaxis": {"range": [-0.15 if missing else -0.06, 1.06], "visible": False},
        "annotations": [
            {**tick, "x": x, "y": y, "text": text, "bgcolor": "rgba(255,255,255,0.75)"}
            for x, y, text in ticks
        ],
        "shapes": [{**line, "x0": place, "x1": place} for place in range(len(axes))],
        "hovermode": "closest",
        "height": 460,
    }


def _parameter_axis(sweep: SweepData, name: str) -> _Axis:
    found = sweep.searched_range(name)
    if found is not None:
        low, high, log = found
        whole = all(isinstance(one, IntDistribution) for one in sweep.distributions(name))
        return _number_axis(name, low, high, log=log, whole=whole)
    known = (d for d in sweep.distributions(name) if isinstance(d, CategoricalDistribution))
    values = [*(option for d in known for option in d.choices)]
    values += [t.params[name] for t in sweep.compared.selected if name in t.params]
    options = list(dict.fromkeys(map(repr, values)))
    shown = {repr(value): format_value(value) for value in values}
    last = max(1, len(options) - 1)
    return _Axis(
        name,
        lambda value: options.index(repr(value)) / last,
        [(index / last, shown[option]) for index, option in enumerate(options)],
    )


def _number_axis(label: str, low: float, high: float, *, log: bool, whole: bool = False) -> _Axis:
    scaled = math.log10 if log else float
    start, width = scaled(low), scaled(high) - scaled(low)

    def place(value: float) -> float:
        return (scaled(value) - start) / width if width else 0.5

    if log:
        inner = [10.0**power for power in range(math.ceil(start), math.floor(start + width) + 1)]
    else:
        inner = [low + width * quarter / 4 for quarter in (1, 2, 3)]
    if whole:
        inner = list(map(round, inner))
    # Not so near the ends that the texts overlap.
    inner = [value for value in inner if 0.07 < place(value) < 0.93]
    ticks = dict.fromkeys([low, *inner, high])
    return _Axis(label, place, [(place(value), format_number(value)) for value in ticks])
