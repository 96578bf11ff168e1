"""Register a sweep's best model in the model registry.

    python -m sweeps.artifacts.model_registry ROOT NAME NUMBER MODEL {pt2|pickle}

prints the version; a program of its own, because torch and MLflow would stay in the driver's
memory. What must not live here: how a model is built (`trainable`), or stored (`tracking`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from sweeps.paths import SweepPaths
from sweeps.recording.trial_config import load_trial_config
from sweeps.stores import best_generation, reach_tracking
from sweeps.view.sweep_view import NoBest, SweepView
from tracking.model_registry import ModelVersion, NotRegistered, register_model
from trainable.config import TrialConfig
from trainable.errors import TrainingError
from trainable.export import load_model
from trainable.failures import exit_with
from trainable.user_code.task_import import prepare_process

_OURS = ("sweeps", "trainable", "tracking", "redaction")
"""Modules without which a registered model must load."""


def register_best(view: SweepView, number: int, model: str, *, pickled: bool) -> str:
    """Register the model of a trial's best checkpoint."""
    record = view.record(number)
    generation = best_generation(view.paths, view.spec, record)
    if isinstance(generation, str):
        raise NoBest(generation)
    run_id = view.delivered.sweep_run_id
    if run_id is None:
        raise NotRegistered(
            f"the run of sweep '{view.paths.name}' is not in the tracking store yet; a registered "
            f"model must belong to a run; deliver it with: {view.paths.command('sync')}"
        )
    config = TrialConfig.model_validate(load_trial_config(view.paths, view.spec, record))
    with contextlib.redirect_stdout(sys.stderr):  # a task or a tracer may print
        built, inputs, contents = load_model(config, generation.address, pickled=pickled)
        wanted = ModelVersion(
            model=built,
            inputs=inputs,
            digest=generation.sha256,
            tags={
                "gradsweep.sweep_id": view.ledger.sweep_id,
                "gradsweep.trial": str(record.number),
                "gradsweep.weights": "averaged" if contents.averaged else "raw",
                **({"gradsweep.base": "included"} if contents.left_out else {}),
                **{
                    metric: repr(value)
                    for metric, value in zip(view.spec.metrics, record.values, strict=True)
                },
            },
            pickled=pickled,
            without=_OURS,
        )
        return register_model(reach_tracking(view.paths, view.spec)[0], run_id, model, wanted)


def main(arguments: list[str]) -> None:
    """Register a model; see the module's docstring."""
    root, name, number, model, form = arguments
    prepare_process()
    try:
        view = SweepView(SweepPaths(Path(root), name))
        version = register_best(view, int(number), model, pickled=form == "pickle")
    except (NoBest, NotRegistered, TrainingError) as error:
        exit_with(error)
    sys.stdout.write(f"{version}\n")  # the answer, which `export.register_best` reads


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # Python would wait for threads that the task has left
