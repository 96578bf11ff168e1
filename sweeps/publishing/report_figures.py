"""The figures of a sweep's report, each with a sentence that explains it.

Optuna draws those that need only a study. The others show how trials ended and what they logged.
What must not live here: summary and tables (`report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import optuna
import plotly.graph_objects as go
from optuna import visualization
from optuna.trial import FrozenTrial
from plotly.colors import sample_colorscale, sequential

from sweeps.config.spec import SweepSpec
from sweeps.formatting import format_number
from sweeps.ledger.reader import of_search
from sweeps.publishing.report_selection import ReportSelection
from sweeps.publishing.report_survival import rungs, survival
from sweeps.results.compare import clip_fraction
from sweeps.results.sweep_status import STATES, SweepStatus

COLOURS = {
    "complete": "#1a7f37",
    "pruned": "#8c959f",
    "failed": "#cf222e",
    "running": "#0969da",
    "waiting": "#bf8700",
}
_VISIBLE_BLUES = sequential.Blues[4:]
"""Optuna's colour scale without its lightest shades, which are invisible on white."""
_T = TypeVar("_T")
_PREFERRED = ("train.optimizer.lr", "train.schedule.warmup", "train.clip.max_norm")
_MAX_NORM = "train.clip.max_norm"
_MAX_AXES = 3
"""The most parameters of the contours (a plot for each pair) and metrics of the Pareto front."""
_MAX_POINTS = 200
"""The most points of one learning curve."""
_MAX_TRIALS = 500
"""The most trials for contours and importance: the cost grows with the square of their number.
Contours of 4,000 trials make a page of 1.1 GB and need 6.6 GB of memory; importance of 1,000
trials takes 30 s."""


@dataclass(frozen=True)
class SweepData:
    """The data of all figures, read once."""

    view: SweepStatus
    study: optuna.Study
    """The study with the first metric only, which most figures show."""
    front: optuna.Study
    """The study with all metrics."""
    names: Mapping[str, str]
    """The names of parameters on axes, by full key."""
    states: Mapping[int, str]
    curves: Mapping[int, Mapping[int, float]]
    selection: ReportSelection
    selected: optuna.Study
    """A study of the selected trials, with their selected values."""

    @property
    def spec(self) -> SweepSpec:
        return self.view.spec

    @property
    def metric(self) -> str:
        """The first metric, which most figures show."""
        return self.spec.metrics[0]

    @property
    def selected_trials(self) -> list[FrozenTrial]:
        return self.selected.get_trials(deepcopy=False)


class NotEnough(Exception):
    """There is too little data for a figure; the message says what is missing."""


class Figure(NamedTuple):
    """One figure of the report."""

    title: str
    sentence: str
    """What the figure shows."""
    draw: Callable[[SweepData], go.Figure]
    """Draws the figure, or raises `NotEnough`."""
    note: Callable[[SweepData], str] = lambda _: ""
    """Returns what else a reader must know about this sweep's figure; may be empty."""


def _selection_note(sweep: SweepData) -> str:
    """Return a sentence about the trials from which a figure of values is drawn."""
    return sweep.selection.sentence


def _sampled_note(sweep: SweepData) -> str:
    """Return the same for a figure with a limited number of trials."""
    if len(sweep.selected_trials) <= _MAX_TRIALS:
        return _selection_note(sweep)
    return f"{_selection_note(sweep)} At most {_MAX_TRIALS} of these are used, evenly spaced."


def _sampled_study(sweep: SweepData) -> optuna.Study:
    if len(sweep.selected_trials) <= _MAX_TRIALS:
        return sweep.selected
    study = optuna.create_study(direction=sweep.selected.direction)
    study.add_trials(thinned(sweep.selected_trials, _MAX_TRIALS))
    return study


def _require_trials(sweep: SweepData, at_least: int) -> None:
    found = len(sweep.selected_trials)
    if found < at_least:
        raise NotEnough(f"it needs {at_least} trials with a value, and there are {found}")


def _axes(sweep: SweepData) -> list[str]:
    """Return the parameters that have more than one value, the usual ones first."""
    keys = [*(k for k in _PREFERRED if k in sweep.names), *sweep.names]
    names = dict.fromkeys(sweep.names[key] for key in keys)
    found = {name: {repr(t.params.get(name)) for t in sweep.selected_trials} for name in names}
    axes = [name for name, values in found.items() if len(values) > 1]
    if not axes:
        raise NotEnough("these trials do not differ in any parameter")
    return axes


def _pareto(sweep: SweepData) -> go.Figure:
    _require_trials(sweep, 1)
    metrics = sweep.spec.metrics
    if len(metrics) > _MAX_AXES:
        raise NotEnough(f"it is drawn for two or three metrics, and there are {len(metrics)}")
    return visualization.plot_pareto_front(sweep.front, target_names=list(metrics))


def _history(sweep: SweepData) -> go.Figure:
    if "complete" not in sweep.states.values():
        raise NotEnough("no trial is complete yet")
    figure = visualization.plot_optimization_history(sweep.study, target_name=sweep.metric)
    # Steps instead of slopes: the best value changes at a trial, not between two trials.
    return figure.update_traces(line={"shape": "hv"}, selector={"mode": "lines"})


def _parallel(sweep: SweepData) -> go.Figure:
    _require_trials(sweep, 2)
    figure = visualization.plot_parallel_coordinate(
        sweep.selected, params=_axes(sweep), target_name=sweep.selection.target
    )
    *lines, scale = figure.data
    for line in lines:  # its first coordinate is the trial's value, scaled to 0..1
        shade = 1 - line.y[0] if scale.marker.reversescale else line.y[0]
        (line.line.color,) = sample_colorscale(_VISIBLE_BLUES, [shade])
    scale.marker.colorscale = _VISIBLE_BLUES
    return figure


def _slices(sweep: SweepData) -> go.Figure:
    _require_trials(sweep, 2)
    return visualization.plot_slice(
        sweep.selected, params=_axes(sweep), target_name=sweep.selection.target
    )


def _contours(sweep: SweepData) -> go.Figure:
    _require_trials(sweep, 3)
    axes = _axes(sweep)[:_MAX_AXES]
    if len(axes) < 2:
        raise NotEnough("these trials differ in only one parameter")
    figure = visualization.plot_contour(
        _sampled_study(sweep), params=axes, target_name=sweep.selection.target
    )
    return figure.update_layout(height=820 if len(axes) > 2 else 480)


def _importance(sweep: SweepData) -> go.Figure:
    _require_trials(sweep, 4)
    if len({t.value for t in sweep.selected_trials}) < 2:
        raise NotEnough("these trials do not differ in their value")
    # Conditions and edits of the space give trials different parameters or distributions.
    first = sweep.selected_trials[0].distributions
    axes = [
        name
        for name in _axes(sweep)
        if name in first
        and all(t.distributions.get(name) == first[name] for t in sweep.selected_trials)
    ]
    if not axes:
        raise NotEnough(
            "there is no parameter that all of these trials drew from one distribution"
        )
    return visualization.plot_param_importances(
        _sampled_study(sweep),
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
        params=axes,
        target_name=sweep.selection.target,
    )


def _learning_curves(sweep: SweepData) -> go.Figure:
    if not any(sweep.curves.values()):
        raise NotEnough("no trial has reported a value")
    best = sweep.view.ledger.front()
    figure = go.Figure()
    for state in STATES:
        numbers = [n for n, s in sweep.states.items() if s == state and sweep.curves[n]]
        if numbers:
            figure.add_trace(_lines(sweep, numbers, state, COLOURS[state], width=1.2))
    if best:
        numbers = [record.number for record in best]
        figure.add_trace(_lines(sweep, numbers, "best", "#000000", width=2.5))
    finite = [v for c in sweep.curves.values() for v in c.values() if math.isfinite(v)]
    if finite and min(finite) > 0 and max(finite) > 10 * min(finite):
        figure.update_yaxes(type="log")
    figure.update_xaxes(title="epoch")
    return figure.update_yaxes(title=sweep.metric)


def _lines(
    sweep: SweepData, numbers: Iterable[int], name: str, colour: str, *, width: float
) -> go.Scatter:
    """Return one trace for many trials: a browser cannot draw a thousand traces quickly."""
    x: list[int | None] = []
    y: list[float | None] = []
    text: list[str] = []
    for number in numbers:
        curve = thinned(sorted(sweep.curves[number].items()))
        x += [*(epoch for epoch, _ in curve), None]
        y += [*(value if math.isfinite(value) else None for _, value in curve), None]
        text += [f"trial {number}"] * (len(curve) + 1)
    return go.Scatter(
        x=x,
        y=y,
        text=text,
        name=name,
        mode="lines+markers",
        marker={"size": 4},
        line={"color": colour, "width": width},
        hovertemplate="%{text}, epoch %{x}: %{y:.4g}",
    )


def thinned(curve: Sequence[_T], most: int = _MAX_POINTS) -> list[_T]:
    """Return at most `most` points of a curve, evenly spaced, with its first and last point."""
    step = max(1, math.ceil((len(curve) - 1) / (most - 1)))
    kept = list(curve[::step])
    return kept if not curve or kept[-1] == curve[-1] else [*kept, curve[-1]]


def _thinning_note(sweep: SweepData) -> str:
    cut = sum(len(curve) > _MAX_POINTS for curve in sweep.curves.values())
    if not cut:
        return ""
    return (
        f"A curve with more than {_MAX_POINTS} reports ({cut} here) is drawn with at most so many "
        "points, evenly spaced, with the first and the last; metrics.jsonl has all."
    )


def _describe_rule(sweep: SweepData) -> str:
    """Return what the sweep's stopping rule does, and how to read its rungs."""
    rule = sweep.spec.early_stopping.rule
    described = f"{rule.name} {rule.description.replace('`', '')}"
    return f"{described} {rule.rungs_note}".rstrip()


def _survival(sweep: SweepData) -> go.Figure:
    levels = rungs(sweep.spec)
    if not levels:
        raise NotEnough(sweep.spec.early_stopping.rule.no_rungs_reason())
    labels = [f"epoch {epoch}" for epoch in levels]
    # An unfinished trial without a worker is `waiting`, even if it is running in the ledger.
    records = [replace(r, state=sweep.states[r.number]) for r in of_search(sweep.view.records)]
    fates = survival(sweep.spec, records)
    if not any(map(any, fates.values())):
        raise NotEnough("no trial has reached a rung")
    figure = go.Figure()
    for fate, counts in fates.items():
        colour = COLOURS.get(fate, "#54aeff")
        shown = [str(count) if count else "" for count in counts]
        figure.add_trace(
            go.Bar(x=labels, y=counts, name=fate, text=shown, marker={"color": colour})
        )
    figure.update_yaxes(title="trials", dtick=max(1, len(sweep.view.records) // 10))
    return figure.update_layout(barmode="stack")


def _clipping(sweep: SweepData) -> go.Figure:
    if _MAX_NORM not in sweep.names:
        raise NotEnough(f"{_MAX_NORM} was not searched")
    clipped = [
        (record, share)
        for record in sweep.view.records
        if isinstance(record.best_params.get(_MAX_NORM), int | float)
        and (share := clip_fraction(sweep.view.paths.trial(record.number))) is not None
    ]
    if not clipped:
        raise NotEnough("no trial has logged how often its gradients were clipped")
    figure = go.Figure()
    for state in STATES:
        found = [(r, share) for r, share in clipped if sweep.states[r.number] == state]
        if found:
            figure.add_trace(
                go.Scatter(
                    x=[record.best_params[_MAX_NORM] for record, _ in found],
                    y=[share for _, share in found],
                    text=[
                        f"trial {r.number}, {sweep.metric} {format_number(r.value)}"
                        for r, _ in found
                    ],
                    name=state,
                    mode="markers",
                    marker={"color": COLOURS[state], "size": 8},
                    hovertemplate="%{text}<br>max_norm %{x:.4g}: %{y:.0%} clipped",
                )
            )
    log = getattr(sweep.spec.space.get(_MAX_NORM), "name", "").startswith("log")
    figure.update_xaxes(title=_MAX_NORM, type="log" if log else "linear")
    return figure.update_yaxes(title="steps clipped", tickformat=".0%", range=[-0.03, 1.03])


def figures(spec: SweepSpec) -> Sequence[Figure]:
    """Return the figures of a sweep, in the order of the page."""
    return FIGURES if len(spec.metrics) == 1 else (_FRONT, *FIGURES)


_FRONT = Figure(
    "Pareto front",
    "Each dot is a complete trial at its values of the metrics. No other trial is better in all "
    "metrics than one on the front (best trials): to choose among these is to trade one metric "
    "for another. The figures below show the first metric.",
    _pareto,
)
FIGURES = (
    Figure(
        "History",
        "Each dot is a complete trial, in the order of their starts; the line is the best value "
        "so far: where it is flat, the search found nothing better.",
        _history,
    ),
    Figure(
        "Learning curves",
        "The metric after each epoch, one line per trial, coloured by how it ended; the black "
        "line is the best complete trial. Grey lines are trials that were stopped early; their "
        "last value is not final.",
        _learning_curves,
        _thinning_note,
    ),
    Figure(
        "Survival from rung to rung",
        "How many trials reached each rung of early stopping, and what happened to them there: "
        "a good search stops many early and trains the best to the end.",
        _survival,
        _describe_rule,
    ),
    Figure(
        "Parallel coordinates",
        "Each line is a trial, from its value to its parameters; darker is better. Parameters "
        "that were searched on a logarithmic scale have a logarithmic axis.",
        _parallel,
        _selection_note,
    ),
    Figure(
        "Slices",
        "Value against one parameter at a time; darker dots came later in the search.",
        _slices,
        _selection_note,
    ),
    Figure(
        "Contours",
        "Value over two parameters at a time, interpolated between the trials (dots): in a long "
        "valley one parameter compensates for the other.",
        _contours,
        _sampled_note,
    ),
    Figure(
        "Importance",
        "How much of the value's variance each parameter explains, alone and together with "
        "others (fANOVA): search important parameters more finely, and fix the others.",
        _importance,
        _sampled_note,
    ),
    Figure(
        "Clipping",
        "The fraction of a trial's steps whose gradients were clipped, over the maximum norm: "
        "near 100 % the norm, not the learning rate, determines the step; at 0 % gradients are "
        "never clipped.",
        _clipping,
    ),
)
"""In the order of the page."""
