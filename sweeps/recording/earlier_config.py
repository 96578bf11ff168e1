"""Keep the configuration of a trial that resumes with another one, and return all that it had.

What must not live here: the file (`trainable.earlier_configs`), and smaller micro-batches, which
the worker itself keeps (`trainable.ray_adapter`).
"""

from __future__ import annotations

from sweeps.checkpoint_locations import trial_store
from sweeps.config.revisions import changes
from sweeps.config.spec import SweepSpec, trial_yaml
from sweeps.config.trial_run import with_accumulation
from sweeps.paths import TRIAL_CONFIG, SweepPaths
from sweeps.recording.trial_config import read_config
from trainable.config import TrialConfig
from trainable.earlier_configs import add_earlier
from trainable.storage.regular_files import LARGEST_TEXT, read_regular

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

    Args:
        paths: The sweep's directory.
        spec: The sweep's spec.
        number: The trial's number.
        config: What it resumes with.
        accumulation: Its micro-batches for each step; None: those of the configuration.

    Raises:
        StorageError: The storage of the checkpoints cannot be read.
        OSError: The trial's directory cannot be written.
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
