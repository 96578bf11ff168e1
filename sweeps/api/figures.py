"""The figures of the report, as Plotly figures for a notebook.

What must not live here: how they are drawn (`publishing.report_figures`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sweeps.paths import SweepPaths

if TYPE_CHECKING:
    import plotly.graph_objects as go


class Figures:
    """The report's figures of one sweep, drawn anew at each call.

    Each raises NotEnough if there is too little data; its message says what is missing.

    Examples:
        >>> figures = Sweep.open("digits").figures
        >>> figures.history().update_layout(title="digits")
        >>> figures.curves().to_html()
    """

    def __init__(self, paths: SweepPaths) -> None:
        self._paths = paths

    def history(self) -> go.Figure:
        """Each trial's value in the order of their starts, and the best so far."""
        return self._draw("History")

    def curves(self) -> go.Figure:
        """The metric after each epoch, a line for each trial."""
        return self._draw("Learning curves")

    def importance(self) -> go.Figure:
        """How much of the value's variance each parameter explains (fANOVA)."""
        return self._draw("Importance")

    def slices(self) -> go.Figure:
        """The value against one parameter at a time."""
        return self._draw("Slices")

    def parallel(self) -> go.Figure:
        """A line for each trial, from its value to its parameters."""
        return self._draw("Parallel coordinates")

    def contours(self) -> go.Figure:
        """The value over two parameters at a time; needs 30 trials."""
        return self._draw("Contours")

    def survival(self) -> go.Figure:
        """How many trials reached each rung of early stopping."""
        return self._draw("Survival from rung to rung")

    def clipping(self) -> go.Figure:
        """The fraction of clipped steps over the maximum norm."""
        return self._draw("Clipping")

    def timeline(self) -> go.Figure:
        """Each trial from its start to its end."""
        return self._draw("Timeline")

    def pareto(self) -> go.Figure:
        """The trials by their metrics, of a sweep with two or three."""
        return self._draw("Pareto front")

    def _draw(self, title: str) -> go.Figure:
        from sweeps.operations.figures import draw_figure  # loads Optuna and Plotly

        return draw_figure(self._paths, title)
