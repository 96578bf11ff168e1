"""The addresses of MLflow's pages of a sweep's runs.

What must not live here: how MLflow builds an address (`tracking.ui`), and requests to its server.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sweeps.paths import tracking_uri
from sweeps.recording.tags import leaders_view
from sweeps.view.sweep_view import SweepView
from tracking.mlflow_chart_view import of_sweep
from tracking.ui import (
    DEFAULT_ADDRESS,
    charts_page,
    compare_page,
    metrics_page,
    run_page,
    runs_page,
)


def page_of(base: str, view: SweepView) -> str:
    """Return the address of the charts of a sweep's trials; of the server before it has any."""
    if view.delivered.experiment_id is None:
        return f"{base}/"
    experiment = view.delivered.experiment_id
    if (charts := _charts(base, [view], [experiment])) is not None:
        return charts
    # The view of the charts is not delivered yet: the table.
    return runs_page(
        base,
        experiment,
        order_by_metric=f"best/{view.spec.metrics[0]}",
        ascending=view.spec.modes[0] == "min",
        search=of_sweep(view.ledger.sweep_id),
    )


def page_of_trial(base: str, view: SweepView, number: int) -> str | None:
    """Return the address of a trial's run; None before the server has one."""
    experiment, run = view.delivered.experiment_id, view.delivered.run_ids.get(number)
    return run_page(base, experiment, run) if experiment and run else None


def pages_of_trials(
    views: Sequence[SweepView], rows: Sequence[dict[str, Any]], metrics: Sequence[str]
) -> dict[str, str | None]:
    """Return the pages that compare the trials of some rows; each None if there is none."""
    stores = {view.spec.tracking.uri or tracking_uri(view.paths.root) for view in views}
    experiments = [e for view in views if (e := view.delivered.experiment_id) is not None]
    runs = [row["mlflow_run_id"] for row in rows if row["mlflow_run_id"] is not None]
    if len(stores) > 1 or not runs:
        return dict.fromkeys(("mlflow_compare_page", "mlflow_metric_page", "mlflow_charts_page"))
    (store,) = stores
    base = store if store.startswith(("http://", "https://")) else DEFAULT_ADDRESS
    return {
        "mlflow_compare_page": compare_page(base, runs, experiments),
        "mlflow_metric_page": metrics_page(base, runs, experiments, [*metrics, "train/loss"]),
        "mlflow_charts_page": _charts(base, views, experiments),
    }


def _charts(base: str, views: Sequence[SweepView], experiments: Sequence[str]) -> str | None:
    drawn = {leaders_view(view.spec) for view in views}
    if len(views) == 1:  # the experiment may have runs of other sweeps
        own = leaders_view(views[0].spec, views[0].ledger.sweep_id)
        drawn = {own} if own.tag in views[0].delivered.experiment_tags else drawn
    if len(drawn) > 1:
        return None
    (view,) = drawn  # MLflow reads it from the experiment that it sorts first
    known = all(view.tag in one.delivered.experiment_tags for one in views)
    return charts_page(base, experiments, view.key) if known else None
