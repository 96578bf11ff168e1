"""The figures of a sweep's report, each with a sentence that says what one sees.

Optuna draws what only needs its study; the others show what a study does not know: how trials
ended, and what they logged. What must not live here: words and tables (`report`).
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
_SEEN = sequential.Blues[4:]
"""Optuna's scale without its palest shades: it begins with white, which is not seen on white."""
_T = TypeVar("_T")
_PREFERRED = ("train.optimizer.lr", "train.schedule.warmup", "train.clip.max_norm")
_MAX_NORM = "train.clip.max_norm"
_MOST_AXES = 3
"""Parameters of the contours, each pair of which is a picture; metrics of the Pareto front."""
_MOST_POINTS = 200
"""Of one learning curve."""
_MOST_TRIALS = 500
"""For contours, which grow with the square of their trials (4,000: a page of 1.1 GB, 6.6 GB of
memory to write it), and for importance, which takes as much time (half a minute for 1,000)."""


@dataclass(frozen=True)
class SweepData:
    """What everything is drawn from, read once."""

    view: SweepStatus
    study: optuna.Study
    """With the first metric alone: most figures show one value."""
    front: optuna.Study
    """With all metrics."""
    names: Mapping[str, str]
    """Parameters by their full name, as they are called on axes."""
    states: Mapping[int, str]
    curves: Mapping[int, Mapping[int, float]]
    basis: ReportSelection
    alike: optuna.Study
    """The trials of the basis, with their values there."""

    @property
    def spec(self) -> SweepSpec:
        return self.view.spec

    @property
    def metric(self) -> str:
        """What most figures are drawn by."""
        return self.spec.metrics[0]

    @property
    def compared(self) -> list[FrozenTrial]:
        return self.alike.get_trials(deepcopy=False)


class NotEnough(Exception):
    """There is too little to draw a figure from; the message says what is missing."""


class Figure(NamedTuple):
    """One figure of the report."""

    title: str
    sentence: str
    """What one sees."""
    draw: Callable[[SweepData], go.Figure]
    """Draws it, or raises `NotEnough`."""
    further: Callable[[SweepData], str] = lambda _: ""
    """What else the reader of this sweep's must know; nothing where it is drawn as always."""


def _from_whom(sweep: SweepData) -> str:
    """From which trials a figure of values is drawn."""
    return sweep.basis.sentence


def _from_some(sweep: SweepData) -> str:
    """The same of a figure that is drawn from no more trials than it can be."""
    if len(sweep.compared) <= _MOST_TRIALS:
        return _from_whom(sweep)
    return f"{_from_whom(sweep)} Of these no more than {_MOST_TRIALS}, evenly spaced, are used."


def _some(sweep: SweepData) -> optuna.Study:
    if len(sweep.compared) <= _MOST_TRIALS:
        return sweep.alike
    study = optuna.create_study(direction=sweep.alike.direction)
    study.add_trials(thinned(sweep.compared, _MOST_TRIALS))
    return study


def _needs(sweep: SweepData, at_least: int) -> None:
    found = len(sweep.compared)
    if found < at_least:
        raise NotEnough(f"it needs {at_least} trials with a value, and there are {found}")


def _axes(sweep: SweepData) -> list[str]:
    """The parameters that were drawn with more than one value, the usual ones first."""
    keys = [*(k for k in _PREFERRED if k in sweep.names), *sweep.names]
    names = dict.fromkeys(sweep.names[key] for key in keys)
    found = {name: {repr(t.params.get(name)) for t in sweep.compared} for name in names}
    axes = [name for name, values in found.items() if len(values) > 1]
    if not axes:
        raise NotEnough("these trials do not differ in any parameter")
    return axes


def _pareto(sweep: SweepData) -> go.Figure:
    _needs(sweep, 1)
    metrics = sweep.spec.metrics
    if len(metrics) > _MOST_AXES:
        raise NotEnough(f"it is drawn for two or three metrics, and there are {len(metrics)}")
    return visualization.plot_pareto_front(sweep.front, target_names=list(metrics))


def _history(sweep: SweepData) -> go.Figure:
    if not sweep.view.ledger.front():
        raise NotEnough("no trial is complete yet")
    figure = visualization.plot_optimization_history(sweep.study, target_name=sweep.metric)
    # A step, not a slope: the best value changes with a trial, and not between two.
    return figure.update_traces(line={"shape": "hv"}, selector={"mode": "lines"})


def _parallel(sweep: SweepData) -> go.Figure:
    _needs(sweep, 2)
    figure = visualization.plot_parallel_coordinate(
        sweep.alike, params=_axes(sweep), target_name=sweep.basis.target
    )
    *lines, scale = figure.data
    for line in lines:  # which begins at the trial's value, from the least to the greatest
        shade = 1 - line.y[0] if scale.marker.reversescale else line.y[0]
        (line.line.color,) = sample_colorscale(_SEEN, [shade])
    scale.marker.colorscale = _SEEN
    return figure


def _slices(sweep: SweepData) -> go.Figure:
    _needs(sweep, 2)
    return visualization.plot_slice(
        sweep.alike, params=_axes(sweep), target_name=sweep.basis.target
    )


def _contours(sweep: SweepData) -> go.Figure:
    _needs(sweep, 3)
    axes = _axes(sweep)[:_MOST_AXES]
    if len(axes) < 2:
        raise NotEnough("these trials differ in one parameter alone")
    figure = visualization.plot_contour(_some(sweep), params=axes, target_name=sweep.basis.target)
    return figure.update_layout(height=820 if len(axes) > 2 else 480)


def _importance(sweep: SweepData) -> go.Figure:
    _needs(sweep, 4)
    if len({t.value for t in sweep.compared}) < 2:
        raise NotEnough("these trials do not differ in their value")
    # A condition, or an edit of the space, may have left trials with parameters of their own.
    first = sweep.compared[0].distributions
    axes = [
        name
        for name in _axes(sweep)
        if name in first and all(t.distributions.get(name) == first[name] for t in sweep.compared)
    ]
    if not axes:
        raise NotEnough(
            "there is no parameter that all of these trials drew from one distribution"
        )
    return visualization.plot_param_importances(
        _some(sweep),
        evaluator=optuna.importance.FanovaImportanceEvaluator(seed=0),
        params=axes,
        target_name=sweep.basis.target,
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
    """One trace for many trials: a browser draws five traces at once, and not a thousand."""
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


def thinned(curve: Sequence[_T], most: int = _MOST_POINTS) -> list[_T]:
    """Return at most as many points of a curve as can be seen, its ends among them."""
    step = max(1, math.ceil((len(curve) - 1) / (most - 1)))
    kept = list(curve[::step])
    return kept if not curve or kept[-1] == curve[-1] else [*kept, curve[-1]]


def _how_thinned(sweep: SweepData) -> str:
    cut = sum(len(curve) > _MOST_POINTS for curve in sweep.curves.values())
    if not cut:
        return ""
    return (
        f"Of a curve with more than {_MOST_POINTS} reports ({cut} here) no more than so many are "
        "drawn, evenly spaced, the first and the last among them; metrics.jsonl has all."
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
    # A trial that nobody works on waits, whatever the ledger calls it.
    records = [replace(r, state=sweep.states[r.number]) for r in sweep.view.records]
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
        raise NotEnough("no trial has logged how often it was clipped")
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
    "Each dot is a complete trial, by what it came to in each metric. Those of the front (best "
    "trials) are beaten by no other in all of them: to choose among them is to say what one "
    "metric is worth in terms of the other. The figures below show the first metric.",
    _pareto,
)
FIGURES = (
    Figure(
        "History",
        "Each dot is a complete trial, in the order in which they began; the line is the "
        "best value so far: where it is flat, the search found nothing better.",
        _history,
    ),
    Figure(
        "Learning curves",
        "The metric after each epoch, one line per trial, coloured by how it "
        "ended; the black line is the best complete trial. Grey lines that end early were "
        "stopped to save time, and their last value is no final one.",
        _learning_curves,
        _how_thinned,
    ),
    Figure(
        "Survival from rung to rung",
        "How many trials reached each rung of early stopping, and what became of them "
        "there: a sound search stops many early and sends the best to the end.",
        _survival,
        _describe_rule,
    ),
    Figure(
        "Parallel coordinates",
        "Each line is a trial, from its value to its parameters: the darker, the "
        "better; point at one to read it. Parameters that were searched on a logarithmic scale "
        "have a logarithmic axis.",
        _parallel,
        _from_whom,
    ),
    Figure(
        "Slices",
        "Value against one parameter at a time; darker dots came later in the search.",
        _slices,
        _from_whom,
    ),
    Figure(
        "Contours",
        "Value over two parameters at a time, interpolated between the trials (dots): a long "
        "valley means that one parameter makes up for the other.",
        _contours,
        _from_some,
    ),
    Figure(
        "Importance",
        "How much of the value's variation each parameter explains by itself and together "
        "with others (fANOVA): what to search more finely, and "
        "what may be fixed.",
        _importance,
        _from_some,
    ),
    Figure(
        "Clipping",
        "The share of a trial's steps whose gradients were clipped, against the norm they "
        "were clipped to: near 100 % the norm, not the learning rate, decides the step; at 0 % "
        "it is never reached.",
        _clipping,
    ),
)
"""In the order of the page."""
