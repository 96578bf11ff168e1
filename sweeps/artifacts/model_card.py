"""The model card of a trial's weights: data, metric, parameters, provenance, use.

What must not live here: guesses; the card has only recorded facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sweeps.formatting import format_best, format_value, joined
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import TRIAL_CONFIG
from sweeps.spec.logged_params import flatten
from sweeps.spec.spec import SweepSpec
from trainable.config import TaskConfig
from trainable.export import Exported
from trainable.store.manifest import Generation
from trainable.store.notes import RecordedTest

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
