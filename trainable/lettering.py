"""A canvas that draws each text once: pictures of one process share most of theirs.

Matplotlib lays out and renders every label of every picture anew, a quarter of a picture's time.
What must not live here: what is drawn.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any

import numpy
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from numpy.typing import NDArray

_Paper: Any = RendererAgg  # which has no types
_KEPT = 500  # images of some ten thousand bytes
_MARGIN = 2  # pixels around a text, for letters that reach over its box


class LetteringCanvas(FigureCanvasAgg):
    """An Agg canvas of one size, which keeps its renderer."""

    _renderer: _Renderer | None = None

    def get_renderer(self) -> RendererAgg:
        """Return the renderer."""
        if self._renderer is None:
            width, height = self.figure.bbox.size
            self._renderer = _Renderer(width, height, self.figure.dpi)
        return self._renderer


class _Renderer(RendererAgg):
    def __init__(self, width: float, height: float, dpi: float) -> None:
        _Paper.__init__(self, width, height, dpi)
        self._texts: OrderedDict[tuple[object, ...], NDArray[numpy.uint8]] = OrderedDict()

    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: Any,
        angle: float,
        ismath: Any = False,
        mtext: Any = None,
    ) -> None:
        if angle:
            _Paper.draw_text(self, gc, x, y, s, prop, angle, ismath, mtext)
            return
        wide, high, below = _Paper.get_text_width_height_descent(self, s, prop, ismath)
        left, foot = _MARGIN, _MARGIN + math.ceil(below)
        key = (s, hash(prop), ismath, gc.get_rgb(), gc.get_alpha())
        image = self._texts.get(key)
        if image is None:
            paper = _Paper(
                math.ceil(wide) + 2 * _MARGIN, math.ceil(high) + 2 * _MARGIN + 1, self.dpi
            )
            free = paper.new_gc()
            free.copy_properties(gc)
            free.set_clip_rectangle(None)
            free.set_clip_path(None)
            paper.draw_text(free, left, paper.height - foot, s, prop, 0, ismath, mtext)
            image = numpy.asarray(paper.buffer_rgba())[::-1].copy()
            self._texts[key] = image
            if len(self._texts) > _KEPT:
                self._texts.popitem(last=False)
        self.draw_image(gc, round(x) - left, self.height - round(y) - foot, image)
