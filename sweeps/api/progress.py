"""A progress bar for a notebook, which shows no live table: a widget where there are widgets.

What must not live here: the live table of the command line (`commands.progress_display`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator

from sweeps.api.command import in_notebook
from sweeps.config.spec import SweepSpec
from sweeps.errors import LedgerError, RevisionError, SpecError
from sweeps.paths import SweepPaths
from sweeps.results.sweep_status import SweepStatus

_ENDED = ("complete", "pruned", "failed")


@contextlib.contextmanager
def progress_bar(
    paths: SweepPaths, spec: SweepSpec, note: str = ""
) -> Iterator[Callable[[], None]]:
    """Yield a function that updates the bar; it does nothing outside notebooks.

    Args:
        paths: The sweep's files.
        spec: The sweep.
        note: A line above the bar; empty: none.
    """
    if not in_notebook():
        yield lambda: None
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm's advice to install ipywidgets
        from tqdm.auto import tqdm
    if note:
        tqdm.write(note)
    with tqdm(total=spec.max_runs, desc=paths.name, unit="trial") as bar:

        def update() -> None:
            try:
                found = SweepStatus(paths).status()
            except (ValueError, LedgerError, RevisionError, SpecError, OSError):
                return  # it has not begun, or is just being written
            bar.total = found["num_trials"]
            bar.n = sum(found["trials"][state] for state in _ENDED)
            if isinstance(best := found["best"], dict):
                bar.set_postfix_str(f"best {best['value']:.4g} (trial {best['number']})", False)
            bar.refresh()

        yield update
        update()
