"""Read the configuration of a trial from its directory: the spec may have been edited since.

What must not live here: writing that file (the driver), and sampled parameters (`ledger.trials`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.ledger.trials import TrialSummary
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.spec.cross_checks import set_path
from sweeps.spec.revisions import changes
from sweeps.spec.searched_workers import config_path
from sweeps.spec.space import configured
from sweeps.spec.spec import SweepSpec, trial_yaml
from sweeps.spec.trial_run import with_accumulation
from sweeps.spec.yaml_reader import parse
from sweeps.stores import trial_store
from trainable.config import TrialConfig
from trainable.store.notes import add_earlier
from trainable.store.regular_files import LARGEST_TEXT, read_regular


def load_trial_config(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> dict[str, Any]:
    """Return a trial's configuration with its best parameters; the spec's if it is unreadable."""
    try:
        found = read_config(paths.trial(record.number) / TRIAL_CONFIG).model_dump(mode="json")
    except (OSError, ValueError):
        found = spec.model_dump(mode="json", include=set(TrialConfig.model_fields))
        found["workers"] = spec.resources.workers
    for key, value in configured(spec.space, record.best_params).items():
        set_path(found, config_path(key), value)
    return found


def read_config(file: Path) -> TrialConfig:
    """Return the resolved configuration with which a run started."""
    found = parse(read_regular(file, LARGEST_TEXT).decode(), str(file), {}).data
    if not found:  # the driver was killed right before it wrote
        raise ValueError(f"{file} is empty")
    return TrialConfig.model_validate(found)


_NOT_OF_TRAINING = "checkpoint."
"""The section of a configuration that may change without changing the training."""


def keep_earlier(
    paths: SweepPaths,
    spec: SweepSpec,
    number: int,
    config: TrialConfig,
    accumulation: int | None,
) -> None:
    """Keep the stored configuration of a trial if it resumes with another one.

    No worker trains the trial meanwhile. A damaged configuration is not kept.
    """
    directory = paths.trial(number)
    try:
        if read_regular(directory / TRIAL_CONFIG, LARGEST_TEXT) == trial_yaml(config).encode():
            return
        before = with_accumulation(read_config(directory / TRIAL_CONFIG), accumulation)
        found = changes(before, with_accumulation(config, accumulation))
        if all(key.startswith(_NOT_OF_TRAINING) for key in found):
            return
        saved = trial_store(paths, spec, number).generations()
        add_earlier(directory, saved[-1].step if saved else 0, before)
    except (FileNotFoundError, ValueError):
        return
