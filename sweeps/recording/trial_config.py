"""What a trial was trained with, from its own directory: the spec may have been changed since.

What must not live here: writing that file (the driver), and the parameters that were drawn alone
(`ledger.view`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweeps.config.cross_checks import set_path
from sweeps.config.error_messages import key_path
from sweeps.config.space import configured
from sweeps.config.spec import SweepSpec
from sweeps.config.yaml_reader import parse
from sweeps.ledger.reader import TrialSummary
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from trainable.config import TrialConfig
from trainable.rules import EARLIEST
from trainable.storage.regular_files import LARGEST_TEXT, read_regular


def load_trial_config(paths: SweepPaths, spec: SweepSpec, record: TrialSummary) -> dict[str, Any]:
    """Return a trial's resolved configuration as plain data, with the parameters that came to its
    best value; the spec's, which need not fit them, where the trial has none that can be read.
    """
    try:
        found = read_config(paths.trial(record.number) / TRIAL_CONFIG).model_dump(mode="json")
    except (OSError, ValueError):
        found = spec.model_dump(mode="json", include=set(TrialConfig.model_fields))
    for key, value in configured(spec.space, record.best_params).items():
        set_path(found, key_path(key), value)
    return found


def read_config(file: Path) -> TrialConfig:
    """Return the resolved configuration that a run was begun with.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds something else.
    """
    found = parse(read_regular(file, LARGEST_TEXT).decode(), str(file), {}).data
    if not found:  # its driver died right before it wrote
        raise ValueError(f"{file} is empty")
    # Runs of an earlier release do not say, and there was one version of the rules then.
    return TrialConfig.model_validate({"training_rules": EARLIEST, **found})
