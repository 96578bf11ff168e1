"""Export weights with a model card, register models and write reports.

Child processes do it: in the driver's own, torch, MLflow and Plotly would stay in memory. What
must not live here: their work (`trainable.export`, `model_registry`, `report`).
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from redaction.secrets import redact
from sweeps.below_root import check_below_root, check_no_copy
from sweeps.checkpoint_locations import best_generation
from sweeps.engine import fork_server
from sweeps.errors import NoReport, NoVersion
from sweeps.formatting import format_best, format_value, joined
from sweeps.ledger.ranking import ranking
from sweeps.ledger.trials import TrialSummary
from sweeps.path_checks import check_file, check_private, make_private, write_file
from sweeps.paths import TRIAL_CONFIG, SweepPaths, check_name
from sweeps.recording.tags import attempt_tags
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.logged_params import flatten
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.store_access import reach_tracking
from sweeps.view.sweep_status import NoBest, SweepStatus
from trainable.config import TaskConfig
from trainable.errors import StorageError
from trainable.export import STORAGE_UNAVAILABLE, Exported
from trainable.manifest import Generation
from trainable.storage.regular_files import LARGEST_TEXT, read_regular
from trainable.tested import RecordedTest, latest_tested

FILE_NAME = "model_card.md"
WEIGHTS = "model.safetensors"
"""The file of an export with all weights of the model."""
TRAINED_WEIGHTS = "trained_parameters.safetensors"
"""The file of an export without the base that the task builds, such as adapters alone."""
_ALWAYS_LISTED = (
    "train.batch_size",
    "train.precision",
    "train.optimizer.name",
    "train.schedule.name",
)
"""Parameters that are listed even if they were not searched."""


ON_THE_FRONT = "on the Pareto front"


def model_card(
    spec: SweepSpec,
    record: TrialSummary,
    config: Mapping[str, Any],
    generation: Generation,
    provenance: Mapping[str, str],
    ended: int,
    contents: Exported | None = None,
    standing: str = "the best",
    tested: RecordedTest | None = None,
) -> str:
    """Return the card in Markdown."""
    contents = contents or Exported([])
    task = TaskConfig.model_validate(config["task"])
    arguments = ", ".join(f"{key}={value!r}" for key, value in task.arguments.items())
    whole = dict(flatten(config))
    searched = [
        f"| `{k}` | {format_value(v)} | searched: {_range(spec, k)} |"
        for k, v in record.best_params.items()
    ]
    fixed = [
        f"| `{key}` | {whole[key]} | fixed |"
        for key in (*_ALWAYS_LISTED, *(key for key in whole if key.startswith("budget.")))
        if key not in record.best_params
    ]
    metric = spec.metrics[0]
    on = " on the validation samples" if metric.startswith("val/") else ""
    selected = "The checkpoint and the trial were"
    if spec.select == "final":
        selected = "It is the checkpoint of the trial's end; the trial was"
    lines = [
        f"# {spec.name}, trial {record.number}",
        "",
        _rank(spec, ended, standing),
        "",
        "## Data",
        "",
        f"Task `{task.name}`"
        + (f" with {arguments}" if arguments else "")
        + "; its `build_data()`, or the loop's own code, creates the training and validation "
        "samples.",
        "",
        "## Metric",
        "",
        f"{metric} {generation.value!r}{on}, after {spec.budget.report_word} {generation.epoch} "
        f"(step {generation.step}). {selected} selected by it, so it is "
        f"optimistic{_tested(tested)}.",
        *_others(spec, record),
        "",
        "## Parameters",
        "",
        "| parameter | value | |",
        "|---|---|---|",
        *searched,
        *fixed,
        "",
        *_lineage(record, spec.budget.report_word),
        f"`{TRIAL_CONFIG}` in this directory has all parameters.",
        "",
        "## Provenance",
        "",
        f"- checkpoint sha256 `{generation.sha256}`",
        f"- attempts: {record.attempts}",
        *(f"- {key}: {value}" for key, value in sorted(provenance.items()) if value),
        "",
        "## Use",
        "",
        *_use(contents),
        "",
        *_average(contents),
        *_held(contents),
    ]
    return "\n".join(lines)


def _tested(tested: RecordedTest | None) -> str:
    """Return the rest of the sentence on the metric: the values on test data."""
    if tested is None:
        return ": measure on samples that the sweep never used"
    found = joined(tested.metrics)
    return f". On {tested.num_samples:,} test samples, which no trial used, it has {found}"


def _lineage(record: TrialSummary, word: str) -> list[str]:
    """Return a line on the weights that the trial copied from others of its population."""
    metrics_at_best = [one for one in record.lineage if one.epoch < (record.best_epoch or 0)]
    if not metrics_at_best:
        return []
    steps = ", ".join(f"trial {one.donor}'s after {word} {one.epoch}" for one in metrics_at_best)
    return [f"The trial had these parameters at its best value. Its weights were {steps}.", ""]


def _use(contents: Exported) -> list[str]:
    """Return how to load the file."""
    if not contents.left_out:
        return [
            f"`{WEIGHTS}` has the weights of the model that the task's `build_model()` "
            "returns, or that its loop yields as `model`; load them with "
            f"`safetensors.torch.load_model(model, '{WEIGHTS}')`."
        ]
    files = "".join(f" `{path}` (sha256 `{one}`)" for path, one in contents.files.items())
    return [
        f"`{TRAINED_WEIGHTS}` has only what was trained or has changed, without the "
        f"{contents.left_out} tensors of the base that the task's `build_model()` returns"
        + (f", with the files{files}" if files else "")
        + ". Load it into that model with "
        f"`safetensors.torch.load_model(model, '{TRAINED_WEIGHTS}', strict=False)`.",
    ]


def _average(contents: Exported) -> list[str]:
    """Return a line that says that the weights are an average, which was also evaluated."""
    if not contents.averaged:
        return []
    return [
        f"The weights are an average, into which those of the training went {contents.averaged} "
        "times. `val/` metrics measured this average.",
        "",
    ]


def _held(contents: Exported) -> list[str]:
    """Return a line on other trained objects, which the task may have evaluated instead."""
    if not contents.held:
        return []
    listed = ", ".join(f"`{name}`" for name in contents.held)
    file = TRAINED_WEIGHTS if contents.left_out else WEIGHTS
    return [
        f"The task also trained {listed} beside the model. Its metrics may come from there, and "
        f"`{file}` does not contain it. It is in the checkpoint's state "
        'below "task".',
        "",
    ]


def _rank(spec: SweepSpec, ended: int, standing: str) -> str:
    among = f"a sweep of {max(ended, spec.max_runs)} trials"
    if ended < spec.max_runs:
        among = f"the {ended} trials that had ended, of {among}"
    sentence = f"{standing} of {among}, by the {spec.objective_description}"
    if standing == ON_THE_FRONT:
        sentence += ": no other trial is as good in all of them and better in one"
    return f"{sentence[0].upper()}{sentence[1:]}."


def _others(spec: SweepSpec, record: TrialSummary) -> Iterator[str]:
    if record.others:
        yield ""
        yield f"In the same report: {format_best(spec.metrics[1:], record.others)}."


def _range(spec: SweepSpec, key: str) -> str:
    return str(spec.space[key]) if key in spec.space else "in an earlier revision"


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


def check(view: SweepStatus, *, directory: Path | None = None, model: str | None = None) -> None:
    """Check where a trial is to be exported and under which name it is to be registered."""
    if model is not None:
        check_name(model, model=True)
        reach_tracking(view.paths, view.spec)
        check_no_copy(view.paths, view.spec, view.ledger.run_from)
        check_below_root(view.paths, view.spec)
    if directory is not None:
        check_private(directory, "--export")


def export(view: SweepStatus, directory: Path, trial: int | None = None) -> list[Path]:
    """Write a trial's weights, configuration and model card; see `export_best`."""
    check(view, directory=directory)
    with make_private(directory, "--export") as place:
        written = export_best(view, place, trial)
    return [directory / file.name for file in written]


def register(view: SweepStatus, trial: int, model: str, *, pickled: bool = False) -> str:
    """Register a trial's model in MLflow, and return its version; see `register_best`."""
    check(view, model=model)
    return register_best(view.paths, trial, model, pickled=pickled)


def report(view: SweepStatus, target: Path) -> Path:
    """Write a sweep's report as a page of HTML."""
    check_file(target, "--output")
    with tempfile.TemporaryDirectory(prefix="sweep-report-") as made:
        page = draw_report(view.paths, Path(made, "report.html")).read_bytes()
    write_file(target, page, "--output")
    return target
