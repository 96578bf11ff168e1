"""Export and register trials, and write reports.

What must not live here: how they are made (`report`).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sweeps.artifacts.export import draw_report, export_best, register_best
from sweeps.path_checks import check_file, check_private, make_private, write_file
from sweeps.paths import check_name
from sweeps.stores import check_below_root, check_no_copy, reach_tracking
from sweeps.view.sweep_view import SweepView


def check(view: SweepView, *, directory: Path | None = None, model: str | None = None) -> None:
    """Check where a trial is to be exported and under which name it is to be registered."""
    if model is not None:
        check_name(model, model=True)
        reach_tracking(view.paths, view.spec)
        check_no_copy(view.paths, view.spec, view.ledger.run_from)
        check_below_root(view.paths, view.spec)
    if directory is not None:
        check_private(directory, "--export")


def export(view: SweepView, directory: Path, trial: int | None = None) -> list[Path]:
    """Write a trial's weights, configuration and model card; see `export_best`."""
    check(view, directory=directory)
    with make_private(directory, "--export") as place:
        written = export_best(view, place, trial)
    return [directory / file.name for file in written]


def register(view: SweepView, trial: int, model: str, *, pickled: bool = False) -> str:
    """Register a trial's model in MLflow, and return its version; see `register_best`."""
    check(view, model=model)
    return register_best(view.paths, trial, model, pickled=pickled)


def report(view: SweepView, target: Path) -> Path:
    """Write a sweep's report as a page of HTML."""
    check_file(target, "--output")
    with tempfile.TemporaryDirectory(prefix="sweep-report-") as made:
        page = draw_report(view.paths, Path(made, "report.html")).read_bytes()
    write_file(target, page, "--output")
    return target
