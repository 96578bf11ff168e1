"""Export weights, register models and write reports, each in a child process.

In the driver's own process, torch, MLflow and Plotly would stay in memory. What must not live
here: the work of the child processes (`trainable.export`, `model_registry`, `report`).
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from redaction.secrets import redact
from sweeps.artifacts.model_card import (
    FILE_NAME,
    ON_THE_FRONT,
    TRAINED_WEIGHTS,
    WEIGHTS,
    model_card,
)
from sweeps.checkpoint_locations import best_generation
from sweeps.engine import fork_server
from sweeps.errors import NoReport, NoVersion
from sweeps.ledger.ranking import ranking
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.recording.tags import attempt_tags
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.view.sweep_status import NoBest, SweepStatus
from trainable.errors import StorageError
from trainable.export import STORAGE_UNAVAILABLE, Exported
from trainable.store.notes import latest_tested
from trainable.store.regular_files import LARGEST_TEXT, read_regular

_ASIDE = ".export-"
"""How the directory begins in which an export writes its files."""
_FILES = (WEIGHTS, TRAINED_WEIGHTS, TRIAL_CONFIG, FILE_NAME)


def export_best(view: SweepStatus, directory: Path, trial: int | None = None) -> list[Path]:
    """Write the best trial's weights and resolved configuration into a new directory.

    The files are moved there when all are complete. What an export left that was killed is
    removed.
    """
    chosen, record = view.select_trial(trial), view.select_weights(trial)
    found = {path.name: path for path in directory.iterdir()} if directory.exists() else {}
    unfinished = [path for name, path in found.items() if name.startswith(_ASIDE)]
    files = [path for path in found.values() if path not in unfinished]
    if files and not (unfinished and found.keys() <= {*_FILES, *(p.name for p in unfinished)}):
        raise FileExistsError(
            f"{directory} is not empty; an export never overwrites files; name a new directory"
        )
    for path in files:  # the marks of an unfinished export stay until these are removed
        path.unlink()
    for path in unfinished:
        shutil.rmtree(path)
    where = attempt_tags(view.ledger.attempts)
    ended = sum(one.finished for one in view.records)
    directory.mkdir(parents=True, exist_ok=True)
    # A process of a killed export may still write into its own directory.
    with tempfile.TemporaryDirectory(dir=directory, prefix=_ASIDE) as aside:
        written = export_trial(
            view.paths, view.spec, record, Path(aside), where, ended, _standing(view, chosen)
        )
        return [path.rename(directory / path.name) for path in written]


def _standing(view: SweepStatus, record: TrialSummary) -> str:
    """Return a trial's place among the trials of its sweep, for the model card."""
    if view.several:
        return ON_THE_FRONT if record in view.ledger.front() else "not on the Pareto front"
    ranked = ranking(view.records, minimize=view.ledger.minimize)
    if record not in ranked:
        return f"a trial that is {view.trial_state(record)}"
    place = ranked.index(record) + 1
    return "the best" if place == 1 else f"number {place}"


def export_trial(
    paths: SweepPaths,
    spec: SweepSpec,
    record: TrialSummary,
    directory: Path,
    provenance: Mapping[str, str],
    ended: int,
    standing: str = "the best",
) -> list[Path]:
    """Write a trial's best weights (safetensors), its resolved configuration and its model card.

    The file of weights is `model.safetensors`, or `trained_parameters.safetensors` if the trial's
    checkpoints have only what was trained.
    """
    generation = best_generation(paths, spec, record)
    if isinstance(generation, str):
        raise NoBest(generation)
    if record.lineage:  # the trial's own file has its last hyperparameters, not its best ones
        resolved = trial_yaml(spec.trial_config(record.seed, record.best_params)).encode()
    else:
        resolved = read_regular(paths.trial(record.number) / TRIAL_CONFIG, LARGEST_TEXT)
    directory.mkdir(parents=True, exist_ok=True)
    weights, config = directory / WEIGHTS, directory / TRIAL_CONFIG
    # In a child process, because torch would stay in the driver's memory.
    child = subprocess.run(
        fork_server.run_module("trainable.export", generation.address, str(weights)),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        start_new_session=True,  # so that only the driver handles Ctrl-C
    )
    if child.returncode:
        later = child.returncode == STORAGE_UNAVAILABLE or child.returncode < 0
        raise StorageError(_reason(child)) if later else NoBest(_reason(child))
    contents = Exported(**json.loads(child.stdout.splitlines()[-1]))
    if contents.left_out:
        weights = weights.rename(directory / TRAINED_WEIGHTS)
    config.write_bytes(resolved)
    card = directory / FILE_NAME
    known = load_trial_config(paths, spec, record)
    tested = latest_tested(paths.trial(record.number))
    if tested is not None and tested.sha256 != generation.sha256:
        tested = None  # of another checkpoint
    text = model_card(
        spec, record, known, generation, provenance, ended, contents, standing, tested
    )
    card.write_text(text, encoding="utf-8")
    return [weights, config, card]


def register_best(paths: SweepPaths, number: int, model: str, *, pickled: bool = False) -> str:
    """Register a sweep's best model in the model registry."""
    form = "pickle" if pickled else "pt2"
    # A child process, for the same reason as in `export_trial`.
    child = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "sweeps.artifacts.model_registry"),
            *(str(paths.root), paths.name, str(number), model, form),
        ],
        capture_output=True,
        text=True,
        errors="replace",  # what a task prints need not be text
        check=False,
    )
    if child.returncode:
        raise NoVersion(_reason(child))
    return child.stdout.strip()


def draw_report(paths: SweepPaths, target: Path) -> Path:
    """Write a sweep's report, an HTML page without external files."""
    # A child process, for the same reason as in `export_trial`.
    child = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "sweeps.report.report"),
            *(str(paths.root), paths.name, str(target)),
        ],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        process_group=0,  # so that only the caller handles Ctrl-C
    )
    if child.returncode:
        raise NoReport(_reason(child))
    return target


def _reason(child: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a child process printed, or the signal that ended it."""
    printed = child.stderr.strip().splitlines()
    if child.returncode < 0:
        return (
            f"its process was ended by {signal.Signals(-child.returncode).name}, probably because "
            "the machine is short of memory; free some, then try again"
        )
    if not printed:
        return f"its process ended with exit code {child.returncode}"
    return redact(printed[-1])
