"""A shared view of an experiment's runs in MLflow's pages: charts, columns and order.

MLflow's pages read such a view from a tag of the experiment, whose key is in the page's URL. A URL
alone cannot name parameters or metrics. What must not live here: setting the tag, and URLs (see
`tracking.ui`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tracking.limits import clean_key
from tracking.mlflow_compat import SHARED_VIEW_TAG

_TRIALS = "tags.`gradsweep.role` = 'trial'"
_SECTION = "leaders"
_AXES = {"lineSmoothness": 0, "xAxisKey": "step"}
_NAME = "attributes.`Run Name`"
"""A column of MLflow's table of runs."""
_OUTCOME = "tags.`outcome`"
"""How a trial ended. MLflow's own status is the same for a complete and a pruned trial."""
_MARK_WIDTH = 30
"""Pixels of the mark of the order in a column's header."""
_MOST_PARAMS = 12
"""With more axes a parallel-coordinates chart is hard to read."""


@dataclass(frozen=True)
class SharedView:
    """One view. Equal views have equal keys, also in different experiments."""

    state: str
    """JSON, as MLflow's pages read it; none of the names in it is documented (MLflow 3.17)."""

    @property
    def key(self) -> str:
        """The view's key in a page's URL."""
        return hashlib.sha256(self.state.encode()).hexdigest()[:16]

    @property
    def tag(self) -> str:
        """The name of the experiment's tag that holds the view."""
        return SHARED_VIEW_TAG + self.key


def shared_view(
    params: Sequence[str],
    metric: str,
    curves: Sequence[str],
    *,
    ascending: bool,
    sweep_id: str | None = None,
) -> SharedView:
    """Return the view of a sweep's trials, with the best ten visible in the charts."""
    chosen = [clean_key(name) for name in params[:_MOST_PARAMS]]
    value = clean_key(metric)
    charts = [
        _chart("parallel", "PARALLEL", selectedParams=chosen, selectedMetrics=[value]),
        *(
            # Without these keys MLflow smooths the curves.
            _chart(f"curve{index}", "LINE", metricKey=name, selectedMetricKeys=[name], **_AXES)
            for index, name in enumerate(map(clean_key, curves))
        ),
    ]
    section = {"uuid": _SECTION, "name": "Leaders", "display": True, "columns": 1}
    columns = [f"metrics.`{value}`", _OUTCOME, *(f"params.`{name}`" for name in chosen)]
    state = {
        "searchFilter": _TRIALS if sweep_id is None else f"{_TRIALS} AND {of_sweep(sweep_id)}",
        "orderByKey": f"metrics.`{value}`",
        "orderByAsc": ascending,
        "selectedColumns": columns,
        "columnOrder": [_NAME, *columns],
        "columnWidths": {
            _NAME: 130,
            columns[0]: _width(value) + _MARK_WIDTH,
            _OUTCOME: _width("outcome"),
            **{f"params.`{name}`": _width(name) for name in chosen},
        },
        "runsHiddenMode": "FIRST_10_RUNS",
        "isAccordionReordered": True,  # or MLflow puts its own sections first
        "compareRunSections": [{**section, "isReordered": True}],
        "compareRunCharts": charts,
    }
    return SharedView(json.dumps(state, separators=(",", ":"), sort_keys=True))


def of_sweep(sweep_id: str) -> str:
    """Return the search filter for the runs of one sweep."""
    return f"tags.`gradsweep.sweep_id` = '{sweep_id}'"


def _width(header: str) -> int:
    """Return the pixels that a column's header needs."""
    return min(max(8 * len(header) + 20, 90), 240)


def _chart(uuid: str, kind: str, **more: Any) -> dict[str, Any]:
    return {
        "uuid": uuid,
        "type": kind,
        "metricSectionId": _SECTION,
        "runsCountToCompare": 10,
        "deleted": False,
        "isGenerated": False,
        **more,
    }
