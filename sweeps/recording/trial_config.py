"""Read the configuration of a trial from its directory: the spec may have been edited since.

What must not live here: writing that file (the driver), and sampled parameters (`ledger.trials`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.config.cross_checks import set_path
from sweeps.config.searched_workers import config_path
from sweeps.config.space import configured
from sweeps.config.spec import SweepSpec
from sweeps.config.yaml_reader import parse
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from trainable.config import TrialConfig
from trainable.storage.regular_files import LARGEST_TEXT, read_regular


def load_trial_config(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> dict[str, Any]:
    """Return a trial's resolved configuration as plain data, with the parameters of its best
    value. If the trial has no readable configuration, the spec's is used.
    """
    try:
        found = read_config(paths.trial(record.number) / TRIAL_CONFIG).model_dump(mode="json")
    except (OSError, ValueError):
        found = spec.model_dump(mode="json", include=set(TrialConfig.model_fields))
        found["workers"] = spec.resources.workers
    for key, value in configured(spec.space, record.best_params).items():
        set_path(found, config_path(key), value)
    return found


def read_config(file: Path) -> TrialConfig:
    """Return the resolved configuration with which a run started.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file has other content.
    """
    found = parse(read_regular(file, LARGEST_TEXT).decode(), str(file), {}).data
    if not found:  # the driver was killed right before it wrote
        raise ValueError(f"{file} is empty")
    return TrialConfig.model_validate(found)
