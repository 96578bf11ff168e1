"""The report's figures and the study of a sweep, for a Python caller.

What must not live here: how figures are drawn (`report.report_figures`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweeps.report.report_data import NotEnough, read_sweep
from sweeps.report.report_data import copy_study as copy_study
from sweeps.report.report_figures import figures

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from sweeps.paths import SweepPaths


def draw_figure(paths: SweepPaths, title: str) -> go.Figure:
    """Draw a figure of the report."""
    data = read_sweep(paths)
    known = {figure.title: figure for figure in figures(data.spec)}
    if title not in known:
        raise NotEnough("the sweep has one metric; a Pareto front needs two or three")
    return known[title].draw(data)
