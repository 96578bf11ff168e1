"""A finished experiment of Ray Tune, written as Tune writes one: a state, a file per trial."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_METRICS = ("train/loss", "train/lr", "train/grad_norm")


def write_experiment(
    root: Path, configs: Sequence[Mapping[str, Any]], steps: int
) -> Callable[[], int]:
    """Write an experiment with a trial for each configuration, and `steps` reports in each.

    Returns:
        Opens it as `Tuner.restore(...).get_results()` does, without starting Ray, and returns how
        many rows `ResultGrid.get_dataframe()` has.
    """
    from ray.train._internal.storage import StorageContext
    from ray.tune import PlacementGroupFactory
    from ray.tune.analysis import ExperimentAnalysis
    from ray.tune.experiment import Trial
    from ray.tune.result_grid import ResultGrid

    storage = StorageContext(str(root), "experiment")
    directory = root / "experiment"  # the storage has made it
    reports = [_report(step) for step in range(1, steps + 1)]
    lines = "".join(json.dumps(one) + "\n" for one in reports)
    first: Path | None = None
    trials = []
    for number, config in enumerate(configs):
        name = f"{number:08d}"
        trial: Any = Trial("loop", stub=True, trial_id=name, config=dict(config), storage=storage)
        trial.placement_group_factory = PlacementGroupFactory([{"CPU": 1}])
        trial.storage.trial_dir_name = f"loop_{name}"
        trial.run_metadata.last_result = reports[-1] | {"trial_id": name}
        trial.set_status(Trial.TERMINATED)
        place = directory / trial.storage.trial_dir_name
        place.mkdir()
        if first is None:
            first = place / "result.json"
            first.write_text(lines)
        else:
            os.link(first, place / "result.json")
        trials.append(trial)
    state = {"trial_data": [trial.get_json_state() for trial in trials]}
    (directory / "experiment_state-2026-01-01_00-00-00.json").write_text(json.dumps(state))
    return lambda: len(ResultGrid(ExperimentAnalysis(str(directory))).get_dataframe())


def _report(step: int) -> dict[str, Any]:
    """A line of `result.json`: three metrics, and what Tune adds to each report."""
    return {
        **dict.fromkeys(_METRICS, 1 / step),
        "timestamp": 1764000000 + step,
        "checkpoint_dir_name": None,
        "done": False,
        "training_iteration": step,
        "trial_id": "00000000",
        "date": "2026-01-01_00-00-00",
        "time_this_iter_s": 0.01,
        "time_total_s": step / 100,
        "pid": 4711,
        "hostname": "bench",
        "node_ip": "127.0.0.1",
        "config": {"train.optimizer.lr": 0.1},
        "time_since_restore": step / 100,
        "iterations_since_restore": step,
    }
