"""Export weights with a model card, register models and write reports.

Child processes do it: in the driver's own, torch, MLflow and Plotly would stay in memory. What
must not live here: their work (`trainable.export`, `model_registry`, `report`).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sweeps.engine import fork_server
from sweeps.errors import NoReport, NoVersion
from sweeps.formatting import counted, format_best, format_value, joined
from sweeps.ledger.ranking import ranking
from sweeps.ledger.trials import TrialSummary
from sweeps.path_checks import check_file, check_private, make_private, write_file
from sweeps.paths import TRIAL_CONFIG, SweepPaths, check_name
from sweeps.recording.tags import attempt_tags
from sweeps.recording.trial_config import load_trial_config
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.spec.trial_run import flatten
from sweeps.stores import best_generation, check_below_root, check_no_copy, reach_tracking
from sweeps.view.sweep_view import NoBest, SweepView
from tracking.child_process import ChildFailed, run_child
from trainable.config import TaskConfig
from trainable.errors import StorageError
from trainable.export import STORAGE_UNAVAILABLE, Exported
from trainable.store.manifest import Generation
from trainable.store.notes import RecordedTest, latest_tested
from trainable.store.regular_files import LARGEST_TEXT, read_regular

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


class Standing(NamedTuple):
    """What a model card says of the sweep around a trial."""

    provenance: Mapping[str, str]
    num_ended: int
    """How many trials had ended."""
    rank: str = "the best"

    @classmethod
    def of(
        cls,
        attempts: Sequence[Mapping[str, str]],
        trials: Iterable[TrialSummary],
        rank: str = "the best",
    ) -> Standing:
        """Return it from the drivers and the trials of a sweep."""
        return cls(attempt_tags(attempts), sum(one.finished for one in trials), rank)


class ExportedWeights(NamedTuple):
    """The weights that a model card describes."""

    generation: Generation
    contents: Exported
    tested: RecordedTest | None = None
    """How they do on test data; None if that was not measured."""


def model_card(
    spec: SweepSpec,
    record: TrialSummary,
    config: Mapping[str, Any],
    weights: ExportedWeights,
    standing: Standing,
) -> str:
    """Return the card in Markdown."""
    generation, contents, tested = weights
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
        _rank(spec, standing),
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
        *(f"- {key}: {value}" for key, value in sorted(standing.provenance.items()) if value),
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


def _rank(spec: SweepSpec, standing: Standing) -> str:
    ended = standing.num_ended
    among = f"a sweep of {counted(max(ended, spec.max_runs), 'trial')}"
    if ended < spec.max_runs:
        among = f"the {counted(ended, 'trial')} that had ended, of {among}"
    sentence = f"{standing.rank} of {among}, by the {spec.objective_description}"
    if standing.rank == ON_THE_FRONT:
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


def export_best(view: SweepView, directory: Path, trial: int | None = None) -> list[Path]:
    """Write the best trial's weights and resolved configuration into a new directory."""
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
    directory.mkdir(parents=True, exist_ok=True)
    # A process of a killed export may still write into its own directory.
    with tempfile.TemporaryDirectory(dir=directory, prefix=_ASIDE) as aside:
        written = export_trial(
            view.paths,
            view.spec,
            record,
            Path(aside),
            Standing.of(view.ledger.attempts, view.records, _rank_in_sweep(view, chosen)),
        )
        # the complete files, so that a killed export leaves none of them
        return [path.rename(directory / path.name) for path in written]


def _rank_in_sweep(view: SweepView, record: TrialSummary) -> str:
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
    standing: Standing,
) -> list[Path]:
    """Write a trial's best weights (safetensors), resolved configuration and model card."""
    generation = best_generation(paths, spec, record)
    if isinstance(generation, str):
        raise NoBest(generation)
    if record.lineage:  # the trial's own file has its last hyperparameters, not its best ones
        resolved = trial_yaml(spec.trial_config(record.seed, record.best_params)).encode()
    else:
        resolved = read_regular(paths.trial(record.number) / TRIAL_CONFIG, LARGEST_TEXT)
    directory.mkdir(parents=True, exist_ok=True)
    weights, config = directory / WEIGHTS, directory / TRIAL_CONFIG
    try:
        reply = run_child(
            *("trainable.export", generation.address, str(weights)),
            launcher=fork_server.launcher(),
        )
    except ChildFailed as error:
        later = error.code == STORAGE_UNAVAILABLE or error.code < 0
        raise StorageError(str(error)) if later else NoBest(str(error)) from None
    contents = Exported(**json.loads(reply))
    if contents.left_out:
        # the checkpoints have only what was trained
        weights = weights.rename(directory / TRAINED_WEIGHTS)
    config.write_bytes(resolved)
    card = directory / FILE_NAME
    known = load_trial_config(paths, spec, record)
    tested = latest_tested(paths.trial(record.number))
    if tested is not None and tested.sha256 != generation.sha256:
        tested = None  # of another checkpoint
    exported = ExportedWeights(generation, contents, tested)
    text = model_card(spec, record, known, exported, standing)
    card.write_text(text, encoding="utf-8")
    return [weights, config, card]


def register_best(paths: SweepPaths, number: int, model: str, *, pickled: bool = False) -> str:
    """Register a sweep's best model in the model registry."""
    wanted = str(paths.root), paths.name, str(number), model, "pickle" if pickled else "pt2"
    launcher = fork_server.launcher()
    try:
        return run_child("sweeps.artifacts.model_registry", *wanted, launcher=launcher)
    except ChildFailed as error:
        raise NoVersion(str(error)) from None


def draw_report(paths: SweepPaths, target: Path) -> Path:
    """Write a sweep's report, an HTML page without external files."""
    wanted = str(paths.root), paths.name, str(target)
    try:
        run_child("sweeps.report.report", *wanted, launcher=fork_server.launcher())
    except ChildFailed as error:
        raise NoReport(str(error)) from None
    return target


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
