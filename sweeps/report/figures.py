"""The figures of a sweep's report, each with a sentence that explains it.

Those over parameters show the value of each trial, over the whole range; trials that were stopped
early are pale. The others show how trials ran and what they logged. What must not live here:
summary and tables (`report`).
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from datetime import UTC, datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import optuna
import plotly.graph_objects as go
from optuna import visualization
from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from plotly.colors import sequential
from plotly.subplots import make_subplots

from sweeps.formatting import counted, format_duration, format_number, format_reason, format_value
from sweeps.ledger.trials import TrialSummary, of_search
from sweeps.report.data import (
    COLOURS,
    MAX_POINTS,
    NotEnough,
    SweepData,
    make_study,
    read_sweep,
    spans_decades,
    thinned,
    value_scale,
)
from sweeps.report.data import copy_study as copy_study
from sweeps.spec.spec import SweepSpec
from sweeps.trust.importance import importance_of, percent
from sweeps.view.compare import clip_fraction
from sweeps.view.sweep_view import STATES
from trainable.store.metrics_file import read_rows

if TYPE_CHECKING:
    from sweeps.paths import SweepPaths

_VISIBLE_BLUES = sequential.Blues[4:]
"""Optuna's colour scale without its lightest shades, which are invisible on white."""
_PREFERRED = ("train.optimizer.lr", "train.schedule.warmup", "train.clip.max_norm")
MAX_TRIALS = 500
"""The most trials for contours and parallel coordinates. Contours of 4,000 trials make a page of
1.1 GB and need 6.6 GB of memory."""
MAX_AXES = 3
"""The most parameters of the contours (a plot for each pair) and metrics of the Pareto front."""
_SLICES = 3
"""Slices beside each other."""
_FEWEST_FOR_CONTOURS = 30
_PADDING = 0.04
"""The part of a range that an axis shows beyond its ends, so that dots there are whole."""
_NONE = "none"
_MISSING = 0.1
"""How far below an axis a trial lies that lacks the parameter, as a part of the range."""
_DECADES_WITH_STEPS = 5
"""Shorter logarithmic axes have ticks between powers of ten."""
_WINNER = "#e8710a"
_SHADE_OF_WORST, _SHADES = 0.2, 0.6
_SCALE_OF_LINES = [
    *((place, "#d5dde6") for place in (0.0, 0.1)),  # stopped early
    *((0.1 + 0.8 * n / (len(_VISIBLE_BLUES) - 1), c) for n, c in enumerate(_VISIBLE_BLUES)),
    *((place, _WINNER) for place in (0.9, 1.0)),
]
_PALE = 0.35
"""The opacity of trials that were stopped early."""


def selection_note(sweep: SweepData) -> str:
    """Return a sentence about the trials from which a figure is drawn."""
    num, stopped = len(sweep.values), len(sweep.stopped)
    drawn = f"Drawn from {counted(num, 'trial')}"
    which = "last" if sweep.spec.select == "final" else "best"
    pale = f"; {stopped} of them, pale, were stopped early" if stopped else ""
    return f"{drawn}, each with its {which} {sweep.metric}{pale}. {scale_note(sweep)}".rstrip()


def scale_note(sweep: SweepData) -> str:
    """Return how many trials are worse than the end of the axis; empty if none is."""
    if sweep.scale is None:
        return ""
    (low, high), minimize = sweep.scale, sweep.view.ledger.minimize
    worse = sum(value > high if minimize else value < low for value in sweep.values.values())
    end = format_number(high if minimize else low)
    return f"The scale ends at {end}; worse than that: {counted(worse, 'trial')}."


def _set_scale(figure: go.Figure, values: Iterable[float], *, minimize: bool) -> None:
    """Choose the value axis: logarithmic, or without the values that would squash the others."""
    values = list(values)
    if spans_decades(values):
        figure.update_yaxes(type="log")
    elif (ends := value_scale(values, minimize=minimize)) is not None:
        padding = _PADDING * (ends[1] - ends[0])
        figure.update_yaxes(range=[ends[0] - padding, ends[1] + padding])


def _within(value: float, scale: tuple[float, float] | None) -> float:
    return value if scale is None else min(max(value, scale[0]), scale[1])


def sampled_note(sweep: SweepData) -> str:
    """Return the same for a figure with a limited number of trials."""
    most = MAX_TRIALS
    if len(sweep.values) <= most:
        return selection_note(sweep)
    return f"{selection_note(sweep)} At most {most} of these are used, evenly spaced."


def _sampled_study(sweep: SweepData) -> optuna.Study:
    """Return the study with a limited number of complete trials, each under its own number."""
    study, selected = sweep.compared, sweep.selected
    if len(selected) <= MAX_TRIALS:
        return study
    kept = {trial.number for trial in thinned(selected, MAX_TRIALS)}
    left_out = create_trial(state=TrialState.FAIL)
    sample = optuna.create_study(direction=study.direction)
    sample.add_trials([t if t.number in kept else left_out for t in study.trials])
    return sample


def _require_trials(sweep: SweepData, at_least: int) -> None:
    found = len(sweep.selected)
    if found < at_least:
        raise NotEnough(f"it needs {at_least} trials with a value, and there are {found}")


def _axes(sweep: SweepData) -> list[str]:
    """Return the parameters that have more than one value, the usual ones first."""
    keys = [*(k for k in _PREFERRED if k in sweep.names), *sweep.names]
    names = dict.fromkeys(sweep.names[key] for key in keys)
    found = {name: {repr(t.params.get(name)) for t in sweep.selected} for name in names}
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


def _best(sweep: SweepData) -> set[int]:
    return {record.number for record in sweep.view.ledger.front()}


def _marked(numbers: Iterable[int], best: Set[int], size: int) -> dict[str, Any]:
    """Return how dots look of which the best are stars."""
    are_best = [number in best for number in numbers]
    return {
        "symbol": ["star" if one else "circle" for one in are_best],
        "size": [2 * size if one else size for one in are_best],
        "line": {"color": [_WINNER if one else "#ffffff" for one in are_best], "width": 1},
    }


def slices(sweep: SweepData) -> go.Figure:
    """Draw the value over each parameter, three beside each other."""
    _require_trials(sweep, 2)
    axes = sorted(_axes(sweep))
    rows, columns = math.ceil(len(axes) / _SLICES), min(len(axes), _SLICES)
    figure = make_subplots(rows, columns, shared_yaxes="all", vertical_spacing=0.28 / rows)
    target = sweep.metric
    for index, name in enumerate(axes):
        # One by one, as Optuna draws all of them in one row, which is too wide for a page.
        one = visualization.plot_slice(sweep.compared, params=[name], target_name=target)
        row, column = index // _SLICES + 1, index % _SLICES + 1
        numbers = one.data[0].marker.color
        pale = [_PALE if n in sweep.stopped else 1.0 for n in numbers]
        marker = {"showscale": index == 0, "opacity": pale, **_marked(numbers, _best(sweep), 8)}
        figure.add_trace(one.data[0].update(marker=marker), row, column)
        shown = one.layout.xaxis.to_plotly_json()
        shown["range"] = axis_range(sweep, name)
        figure.update_xaxes(**shown, tickvals=sweep.whole_numbers(name), row=row, col=column)
        if column == 1:
            figure.update_yaxes(title=target, row=row, col=column)
    last = max(1, len(sweep.view.records) - 1)
    figure.update_traces(
        marker={"colorscale": _VISIBLE_BLUES, "cmin": 0, "cmax": last},
        hovertemplate="trial %{marker.color}<br>%{x}: %{y:.4g}<extra></extra>",
    )
    _set_scale(figure, sweep.values.values(), minimize=sweep.view.ledger.minimize)
    return figure.update_layout(height=160 + 290 * rows)


def contours(sweep: SweepData) -> go.Figure:
    """Draw the value over each pair of parameters."""
    _require_trials(sweep, _FEWEST_FOR_CONTOURS)
    axes = sorted(_axes(sweep)[:MAX_AXES])
    if len(axes) < 2:
        raise NotEnough("these trials differ in only one parameter")
    choices = {n: _options(sweep, n) for n in axes if sweep.searched_range(n) is None}
    known = [t for t in _sampled_study(sweep).trials if t.value is not None]
    trials = [_placed(t, choices, sweep.scale) for t in known]
    study = make_study((trial for _, trial in trials), sweep.view.ledger.minimizes[:1])
    figure = visualization.plot_contour(study, params=axes, target_name=sweep.metric)
    for trace in figure.data:
        # else some trials lack one of the two parameters
        if trace.type == "scatter" and trace.x is not None and len(trace.x) == len(trials):
            trace.text = [f"trial {number}" for number, _ in trials]
            trace.marker.update(_marked((number for number, _ in trials), _best(sweep), 6))
    for place, name in enumerate(axes, start=1):
        options = choices.get(name)
        ends, whole = axis_range(sweep, name), sweep.whole_numbers(name)
        shown: dict[str, Any] = {"range": ends, "tickvals": whole}
        if options is not None:
            ticks = {"tickvals": list(range(len(options))), "ticktext": _texts(options)}
            shown = {"range": [-0.5, len(options) - 0.5], **ticks}
        if len(axes) > 2:
            figure.update_xaxes(**shown, col=place)
            figure.update_yaxes(**shown, row=place)
        else:
            (figure.update_xaxes if place == 1 else figure.update_yaxes)(**shown)
    return figure.update_layout(height=480 if len(axes) == 2 else 820)


def _placed(
    trial: FrozenTrial, choices: Mapping[str, Sequence[Any]], scale: tuple[float, float] | None
) -> tuple[int, FrozenTrial]:
    """Return a trial's number, and the trial on the scale, with the place of each choice."""
    params, distributions = dict(trial.params), dict(trial.distributions)
    for name in choices.keys() & params.keys():
        params[name] = _place(choices[name], params[name])
        distributions[name] = IntDistribution(0, max(1, len(choices[name]) - 1))
    value = _within(trial.value or 0.0, scale)
    made = create_trial(value=value, params=params, distributions=distributions)
    return trial.number, made


def _texts(options: Sequence[Any]) -> list[str]:
    return list(map(format_value, options))


def importance(sweep: SweepData) -> go.Figure:
    """Draw which share of the trials' final order each parameter explains, with its interval."""
    found = importance_of(sweep.view)
    if found is None:
        raise NotEnough("too few trials have ended with different values; sweep audit counts them")
    shown = list(found.shares.items())[::-1]  # Plotly begins at the bottom
    shares = [share for _, share in shown]
    figure = go.Figure(
        go.Bar(
            x=[share.value for share in shares],
            y=[sweep.names[key] for key, _ in shown],
            orientation="h",
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [share.high - share.value for share in shares],
                "arrayminus": [share.value - share.low for share in shares],
                "color": "#57606a",
            },
            marker={
                "color": ["#0969da" if share.is_clear else "#b6c2cf" for share in shares],
            },
            hovertext=[f"{percent(s.low)} to {percent(s.high)}" for s in shares],
            hovertemplate="%{y}: %{hovertext}<extra></extra>",
        )
    )
    names = [sweep.names[key] for key, _ in shown]
    said = [
        f"{percent(s.low)} to {percent(s.high)}" if s.is_known else "not known yet" for s in shares
    ]
    labels = [
        f"{name}<br><span style='font-size:9px'>{text}</span> "
        for name, text in zip(names, said, strict=True)
    ]
    figure.update_yaxes(tickvals=names, ticktext=labels)
    figure.update_xaxes(title="share of the final order", range=[0, 1.02], tickformat=".0%")
    return figure.update_layout(height=160 + 50 * len(shown))


def parallel(sweep: SweepData) -> go.Figure:
    """Draw each trial as a line over its value and its parameters."""
    _require_trials(sweep, 2)
    minimize, best = sweep.view.ledger.minimize, _best(sweep)
    trials = [t for t in _sampled_study(sweep).trials if t.value is not None]
    trials.sort(key=lambda t: t.value or 0.0, reverse=minimize)
    shades = {}
    for place, trial in enumerate(trials):
        shades[trial.number] = _SHADE_OF_WORST + _SHADES * place / len(trials)
        if trial.number in sweep.stopped:
            shades[trial.number] = 0.0
        if trial.number in best:
            shades[trial.number] = 1.0
    trials.sort(key=lambda t: shades[t.number])  # the last ones are on top
    values = [_within(t.value or 0.0, sweep.scale) for t in trials]
    dimensions = [
        _number_axis(sweep.metric, values, min(values), max(values), log=spans_decades(values))
    ]
    for name in _axes(sweep):
        params = [t.params.get(name) for t in trials]
        found, options = sweep.searched_range(name), _options(sweep, name)
        if found is None:
            dimensions.append(_choice_axis(name, params, options))
        else:
            low, high, log = found
            axis = _number_axis(name, params, low, high, log=log)
            if (whole := sweep.whole_numbers(name)) is not None and None not in params:
                axis |= {"tickvals": whole, "ticktext": list(map(str, whole))}
            dimensions.append(axis)
    last = max(1, len(sweep.view.records) - 1)
    numbers = {"label": "trial", "values": [t.number for t in trials], "range": [0, last]}
    line = {
        "color": [shades[t.number] for t in trials],
        "colorscale": _SCALE_OF_LINES,
        "cmin": 0.0,
        "cmax": 1.0,
    }
    figure = go.Figure(go.Parcoords(line=line, dimensions=[*dimensions, numbers]))
    # above the axes, their names and ends
    return figure.update_layout(height=480, margin={"t": 80})


def _number_axis(
    label: str, values: Sequence[Any], low: float, high: float, *, log: bool
) -> dict[str, Any]:
    """Return an axis of parallel coordinates: a range, logarithmic or not."""
    scaled = math.log10 if log else float
    start, end = scaled(low), scaled(high)
    axis: dict[str, Any] = {"label": label, "range": [start, end]}
    ticks = [low, *_ticks(low, high), high] if log else [low, (low + high) / 2, high]
    is_missing = None in values
    below = start - _MISSING * (end - start)
    axis["values"] = [below if one is None else scaled(one) for one in values]
    if log or is_missing:
        axis["tickvals"] = [scaled(tick) for tick in ticks]
        axis["ticktext"] = [format_number(tick) for tick in ticks]
    return _with_none(axis, below) if is_missing else axis


def _choice_axis(label: str, values: Sequence[Any], options: Sequence[Any]) -> dict[str, Any]:
    """Return an axis of parallel coordinates: choices, evenly spaced."""
    places = [-1 if one is None else _place(options, one) for one in values]
    axis = {
        "label": label,
        "range": [0, max(1, len(options) - 1)],
        "values": places,
        "tickvals": list(range(len(options))),
        "ticktext": _texts(options),
    }
    return _with_none(axis, -1) if -1 in places else axis


def _with_none(axis: dict[str, Any], below: float) -> dict[str, Any]:
    """Let an axis begin with a place for trials that lack the parameter."""
    axis["range"] = [below, axis["range"][1]]
    axis["tickvals"], axis["ticktext"] = [below, *axis["tickvals"]], [_NONE, *axis["ticktext"]]
    return axis


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers between the ends of a logarithmic range."""
    start, end = math.log10(low), math.log10(high)
    factors = (1, 2, 5) if end - start < _DECADES_WITH_STEPS else (1,)
    powers = range(math.floor(start), math.ceil(end) + 1)
    found = [factor * 10.0**power for power in powers for factor in factors]
    margin = _PADDING * (end - start)
    return [tick for tick in found if start + margin < math.log10(tick) < end - margin]


def _options(sweep: SweepData, name: str) -> list[Any]:
    """Return the choices of a parameter, numbers in their order, others as the spec has them."""
    known = (d for d in sweep.distributions(name) if isinstance(d, CategoricalDistribution))
    values = [*(option for d in known for option in d.choices)]
    values += [t.params[name] for t in sweep.selected if name in t.params]
    options = list({repr(value): value for value in values}.values())
    numbers = all(type(value) in (int, float) for value in options)
    return sorted(options) if numbers else options


def _place(options: Sequence[Any], value: object) -> int:
    return next(n for n, option in enumerate(options) if repr(option) == repr(value))


_MAX_NORM = "train.clip.max_norm"


class Figure(NamedTuple):
    """One figure of the report."""

    title: str
    question: str
    """The question that the figure answers."""
    sentence: str
    """What the figure shows."""
    draw: Callable[[SweepData], go.Figure]
    """Draws the figure, or raises `NotEnough`."""
    note: Callable[[SweepData], str] = lambda _: ""
    """Returns what else a reader must know about this sweep's figure; may be empty."""


def _pareto(sweep: SweepData) -> go.Figure:
    metrics = sweep.spec.metrics
    if not sweep.selected:
        raise NotEnough("it needs 1 trial with a value, and there are 0")
    if len(metrics) > MAX_AXES:
        raise NotEnough(f"it is drawn for two or three metrics, and there are {len(metrics)}")
    return visualization.plot_pareto_front(sweep.counted(), target_names=list(metrics))


def _history(sweep: SweepData) -> go.Figure:
    known = [r for r in sweep.view.records if r.has_result and r.value is not None]
    if not known:
        raise NotEnough("no trial has ended with a value yet")
    figure = go.Figure()
    word = sweep.spec.budget.report_word
    for state in ("pruned", "complete"):
        mine = [record for record in known if record.state == state]
        if mine:
            figure.add_trace(
                go.Scatter(
                    x=[record.number for record in mine],
                    y=[record.value for record in mine],
                    text=[f"trial {r.number}, {word} {r.best_epoch}" for r in mine],
                    name=state,
                    mode="markers",
                    marker={"color": COLOURS[state], "size": 8},
                    hovertemplate="%{text}: %{y:.4g}<extra></extra>",
                )
            )
    best = min if sweep.view.ledger.minimize else max
    values = [record.value for record in known if record.value is not None]
    feasible = [
        (r.number, r.value) for r in known if r.feasible is not False and r.value is not None
    ]
    figure.add_trace(
        go.Scatter(
            x=[number for number, _ in feasible],
            y=list(accumulate((value for _, value in feasible), best)),
            name="best so far",
            mode="lines",
            # Steps instead of slopes: the best value changes at a trial, not between two trials.
            line={"shape": "hv", "color": "#000000", "width": 1.5},
            hovertemplate="best so far: %{y:.4g}<extra></extra>",
        )
    )
    _set_scale(figure, values, minimize=sweep.view.ledger.minimize)
    _whole_numbers(figure.update_xaxes(title="trial"), len(sweep.view.records))
    return figure.update_yaxes(title=sweep.metric)


def _history_note(sweep: SweepData) -> str:
    return f"{scale_note(sweep)} A double click shows all." if sweep.scale else ""


def _whole_numbers(figure: go.Figure, count: int) -> go.Figure:
    """Show no ticks between the numbers of trials."""
    return figure.update_xaxes(dtick=1) if count <= 12 else figure


def _timeline(sweep: SweepData) -> go.Figure:
    bars = [
        (record, start, end)
        for record in sweep.view.records
        if (start := sweep.starts.get(record.number)) is not None
        and (end := _end(sweep, record)) is not None
    ]
    if not bars:
        raise NotEnough("no trial has started")
    figure = go.Figure()
    for state in STATES:
        mine = [bar for bar in bars if sweep.states[bar[0].number] == state]
        if not mine:
            continue
        lengths = [max(0.0, (end - start).total_seconds()) for _, start, end in mine]
        figure.add_trace(
            go.Bar(
                base=[start.isoformat(timespec="milliseconds") for _, start, _ in mine],
                x=[1000 * length for length in lengths],
                y=[record.number for record, _, _ in mine],
                orientation="h",
                width=0.8,  # else the bars of a state with few trials are high
                name=state,
                marker={"color": COLOURS[state], "line": {"width": 0}},
                text=[f"{r.attempts} attempts" if r.attempts > 1 else "" for r, _, _ in mine],
                hovertext=[
                    _bar_text(sweep, record, length)
                    for (record, _, _), length in zip(mine, lengths, strict=True)
                ],
                hovertemplate="%{hovertext}<extra></extra>",
            )
        )
    count = len(sweep.view.records)
    figure.update_xaxes(type="date", title="time (UTC)")
    figure.update_yaxes(title="trial", range=[count - 0.4, -0.6], dtick=max(1, count // 20))
    return figure.update_layout(barmode="overlay", height=min(900, 200 + 14 * count))


def _end(sweep: SweepData, record: TrialSummary) -> datetime | None:
    """Return when a trial ended, or when it last logged; None if it did neither."""
    if record.ended_at is not None:
        return record.ended_at
    if sweep.states[record.number] == "running":
        return datetime.now(UTC).replace(tzinfo=None)
    times = [row.timestamp_ms for row in read_rows(sweep.view.paths.trial(record.number))]
    if not times:
        return None
    return datetime.fromtimestamp(times[-1] / 1000, UTC).replace(tzinfo=None)


def _bar_text(sweep: SweepData, record: TrialSummary, seconds: float) -> str:
    attempts = counted(record.attempts, "attempt")
    state = sweep.states[record.number]
    text = f"trial {record.number}: {state} at {sweep.spec.budget.report_word} {record.epoch}"
    reason = f"<br>{html.escape(format_reason(record.reason))}" if record.reason else ""
    return f"{text}<br>{format_duration(seconds)}, {attempts}{reason}"


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
    _set_scale(figure, _reported(sweep), minimize=sweep.view.ledger.minimize)
    figure.update_xaxes(title=sweep.spec.budget.report_word)
    return figure.update_yaxes(title=sweep.metric)


def _reported(sweep: SweepData) -> list[float]:
    return [value for curve in sweep.curves.values() for value in curve.values()]


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
        hovertemplate=f"%{{text}}, {sweep.spec.budget.report_word} %{{x}}: %{{y:.4g}}",
    )


def _thinning_note(sweep: SweepData) -> str:
    cut = sum(len(curve) > MAX_POINTS for curve in sweep.curves.values())
    is_cut = value_scale(_reported(sweep), minimize=sweep.view.ledger.minimize) is not None
    whole = "Values far worse than most lie beyond the axis; a double click shows all." * is_cut
    if not cut:
        return whole
    return (
        f"{whole} A curve with more than {MAX_POINTS} reports ({cut} here) is drawn with at most "
        "so many points, evenly spaced, with the first and the last; metrics.jsonl has all."
    )


def _describe_rule(sweep: SweepData) -> str:
    """Return what the sweep's stopping rule does, and how to read its rungs."""
    rule = sweep.spec.early_stopping.rule
    described = f"{rule.name} {rule.description.replace('`', '')}"
    notes = [described, rule.rungs_note]
    if len(sweep.spec.metrics) > 1 and rungs(sweep.spec):
        notes.append("The best by all metrics: by non-dominated front, then by hypervolume.")
    exempt = sum(record.exempt for record in of_search(sweep.view.records))
    if exempt:
        notes.append(f"Trials that are exempt, and continue in any case: {exempt}.")
    return " ".join(filter(None, notes))


def _survival(sweep: SweepData) -> go.Figure:
    levels = rungs(sweep.spec)
    if not levels:
        raise NotEnough(sweep.spec.early_stopping.rule.no_rungs_reason())
    labels = [f"{sweep.spec.budget.report_word} {level}" for level in levels]
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
    name = sweep.names[_MAX_NORM]
    known = sweep.searched_range(name)
    log = known is not None and known[2]
    figure.update_xaxes(title=name, type="log" if log else "linear")
    if known is not None:
        figure.update_xaxes(range=axis_range(sweep, name))
    return figure.update_yaxes(title="steps clipped", tickformat=".0%", range=[-0.03, 1.03])


def figures(spec: SweepSpec) -> Sequence[Figure]:
    """Return the figures of a sweep, in the order of the page."""
    return FIGURES if len(spec.metrics) == 1 else (_FRONT, *FIGURES)


_FRONT = Figure(
    "Pareto front",
    "Which trials trade one metric for another?",
    "Each dot is a trial at its values of the metrics. No other trial is better in all "
    "metrics than one on the front (best trials): to choose among these is to trade one metric "
    "for another. The figures below show the first metric.",
    _pareto,
)
FIGURES = (
    Figure(
        "History",
        "Does the search still find better trials?",
        "Each dot is a trial at its best value, in the order of their starts; grey dots were "
        "stopped early. The line is the best value so far: where it is flat, the search found "
        "nothing better.",
        _history,
        _history_note,
    ),
    Figure(
        "Learning curves",
        "How did the trials learn?",
        "The metric at each report, one line per trial, coloured by how it ended; the black "
        "line is the best trial. Grey lines are trials that were stopped early; their last value "
        "is not final.",
        _learning_curves,
        _thinning_note,
    ),
    Figure(
        "Survival from rung to rung",
        "Where did early stopping stop trials?",
        "How many trials reached each rung of early stopping, and what happened to them there: "
        "a good search stops many early and trains the best to the end.",
        _survival,
        _describe_rule,
    ),
    Figure(
        "Importance",
        "Which parameters decide how a trial ends?",
        "How much of the order in which trials end each parameter explains, and the range that "
        "holds that share with 95 %; grey bars may be chance. Stopped trials have the place that "
        "they had among the others when they were stopped.",
        importance,
    ),
    Figure(
        "Slices",
        "Which values are good?",
        "Value against one parameter at a time; darker dots came later in the search. The star is "
        "the best trial.",
        slices,
        selection_note,
    ),
    Figure(
        "Parallel coordinates",
        "Which combinations are good?",
        "Each line is a trial: grey ones were stopped early, darker ones are better, and the "
        "orange one is the best. Each axis is the whole searched range, logarithmic where it was "
        "searched so. Drag along an axis to select trials, and drag its name to move it.",
        parallel,
        sampled_note,
    ),
    Figure(
        "Contours",
        "Does one parameter make up for another?",
        "Value over two parameters at a time, interpolated between the trials (dots): along a "
        "slanting band of one colour, one parameter makes up for the other. The star is the best "
        "trial.",
        contours,
        sampled_note,
    ),
    Figure(
        "Clipping",
        "How much did the clipping norm decide?",
        "The fraction of a trial's steps whose gradients were clipped, over the maximum norm: "
        "near 100 % the norm, not the learning rate, determines the step; at 0 % gradients are "
        "never clipped.",
        _clipping,
    ),
    Figure(
        "Timeline",
        "Where did the time go?",
        "From each trial's first start to its end, with the pauses between two attempts; a "
        "trial that has not ended is drawn until now, or to its last report.",
        _timeline,
    ),
)
"""In the order of the page."""


def rungs(spec: SweepSpec) -> list[int]:
    """Return the epochs of all rungs, and the last epoch; empty if the rule has no rungs."""
    below = spec.early_stopping.rule.rungs(spec.budget.reports)
    return [*below, spec.budget.reports] if below else []


def survival(spec: SweepSpec, records: Sequence[TrialSummary]) -> dict[str, list[int]]:
    """Count the trials that reached each rung, by what happened to them next."""
    levels, rule = rungs(spec), spec.early_stopping.rule
    records = [record for record in records if record.role != "repeat"]
    firsts = [rule.first_rung(record.place, spec.budget.reports) for record in records]
    counts: dict[str, list[int]] = {"continued": [0] * len(levels)}
    for record, first in zip(records, firsts, strict=True):
        for index in range(first, len(levels)):
            if record.epoch < levels[index]:
                break
            is_last = index == len(levels) - 1 or record.epoch < levels[index + 1]
            fate = record.state if is_last else "continued"
            counts.setdefault(fate, [0] * len(levels))[index] += 1
    return counts


def draw_figure(paths: SweepPaths, title: str) -> go.Figure:
    """Draw a figure of the report."""
    data = read_sweep(paths)
    known = {figure.title: figure for figure in figures(data.spec)}
    if title not in known:
        raise NotEnough("the sweep has one metric; a Pareto front needs two or three")
    return known[title].draw(data)
