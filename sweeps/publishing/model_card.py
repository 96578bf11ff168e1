"""The model card of a trial's weights: what they are, from what, and how they are read.

What must not live here: anything that is guessed; what is not recorded is not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweeps.config.logged_params import flatten
from sweeps.config.spec import SweepSpec
from sweeps.formatting import format_best, format_value
from sweeps.ledger.reader import TrialSummary
from sweeps.paths import TRIAL_CONFIG
from trainable.config import TaskConfig
from trainable.manifest import Generation

FILE_NAME = "model_card.md"
_TOLD = (
    "train.batch_size",
    "train.precision",
    "train.optimizer.name",
    "train.schedule.name",
    "budget.epochs",
)
"""What is told also where it was not searched."""


def model_card(
    spec: SweepSpec,
    record: TrialSummary,
    config: Mapping[str, Any],
    generation: Generation,
    provenance: Mapping[str, str],
    ended: int,
    held: Sequence[str] = (),
) -> str:
    """Return the card in Markdown.

    Args:
        spec: The sweep.
        record: The trial.
        config: What it was trained with.
        generation: The checkpoint that the weights are from.
        provenance: From where and with what the sweep was run, as tags.
        ended: How many trials had their end by then.
        held: What the task trained beside the model, and is not among the weights.
    """
    task = TaskConfig.model_validate(config["task"])
    arguments = ", ".join(f"{key}={value!r}" for key, value in task.arguments.items())
    whole = dict(flatten(config))
    searched = [
        f"| `{k}` | {format_value(v)} | searched: {_range(spec, k)} |"
        for k, v in record.best_params.items()
    ]
    told = [
        f"| `{key}` | {whole[key]} | fixed |" for key in _TOLD if key not in record.best_params
    ]
    metric = spec.metrics[0]
    on = " on the validation samples" if metric.startswith("val/") else ""
    lines = [
        f"# {spec.name}, trial {record.number}",
        "",
        _rank(spec, ended),
        "",
        "## Data",
        "",
        f"Task `{task.name}`"
        + (f" with {arguments}" if arguments else "")
        + "; its `build_data()`, or where it is a loop its own code, makes the samples that were "
        "trained on and evaluated on.",
        "",
        "## Metric",
        "",
        f"{metric} {generation.value!r}{on}, after epoch {generation.epoch} (step "
        f"{generation.step}). It chose this checkpoint and this trial, so it is optimistic: "
        "measure on samples that the sweep never saw.",
        *_others(spec, record),
        "",
        "## Parameters",
        "",
        "| parameter | value | |",
        "|---|---|---|",
        *searched,
        *told,
        "",
        *_lineage(record),
        f"All of them: `{TRIAL_CONFIG}` beside this file.",
        "",
        "## Provenance",
        "",
        f"- checkpoint sha256 `{generation.sha256}`",
        f"- attempts: {record.attempts}",
        *(f"- {key}: {value}" for key, value in sorted(provenance.items()) if value),
        "",
        "## Use",
        "",
        "`model.safetensors` holds the weights of what the task's `build_model()` makes, or of "
        "what its loop yielded as `model`; read them with "
        "`safetensors.torch.load_model(model, 'model.safetensors')`.",
        "",
        *_held(held),
    ]
    return "\n".join(lines)


def _lineage(record: TrialSummary) -> list[str]:
    """Say how it came about when it did not train with these parameters from the beginning."""
    metrics_at_best = [one for one in record.lineage if one.epoch < (record.best_epoch or 0)]
    if not metrics_at_best:
        return []
    steps = ", ".join(f"trial {one.donor}'s after epoch {one.epoch}" for one in metrics_at_best)
    return [f"With these it came to its value; it went on from other weights: {steps}.", ""]


def _held(names: Sequence[str]) -> list[str]:
    """Say what the task may have evaluated in place of these weights."""
    if not names:
        return []
    listed = ", ".join(f"`{name}`" for name in names)
    return [
        f"The task also trained {listed}, which it holds beside the model: its metrics may be "
        "those of that, and `model.safetensors` does not have it. It is in the checkpoint's state "
        'below "task".',
        "",
    ]


def _rank(spec: SweepSpec, ended: int) -> str:
    among = f"a sweep of {max(ended, spec.trials)} trials"
    if ended < spec.trials:
        among = f"the {ended} trials that had ended, of {among}"
    if len(spec.metrics) == 1:
        return f"The best of {among}, by the {spec.objective_description}."
    return (
        f"On the Pareto front of {among}, by the {spec.objective_description}: no other "
        "trial is as good in all of them and better in one."
    )


def _others(spec: SweepSpec, record: TrialSummary) -> Iterator[str]:
    if record.others:
        yield ""
        yield f"In the same report: {format_best(spec.metrics[1:], record.others)}."


def _range(spec: SweepSpec, key: str) -> str:
    return str(spec.space[key]) if key in spec.space else "in an earlier revision"
