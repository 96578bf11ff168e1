"""The configuration that a trial had is kept when it resumes with another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.paths import TRIAL_CONFIG
from sweeps.recording.trial_config import keep_earlier
from sweeps.spec.spec import trial_yaml
from tests.fake_checkpoints import commit
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.config import TrialConfig
from trainable.store.notes import EARLIER, read_earlier


@pytest.fixture
def sweep(tmp_path: Path) -> MadeSweep:
    """A sweep with a trial that was interrupted at step 20."""
    sweep = MadeSweep(tmp_path)
    number = sweep.add(None, 0.5, 0.4)
    directory = sweep.paths.trial(number)
    directory.mkdir(parents=True)
    (directory / TRIAL_CONFIG).write_text(trial_yaml(_config(sweep)))
    return sweep


def _config(sweep: MadeSweep, **train: Any) -> TrialConfig:
    record = sweep.ledger.trial(0)
    config = sweep.spec.trial_config(record.seed, record.params)
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def _keep(sweep: MadeSweep, config: TrialConfig, accumulation: int | None = None) -> list[Any]:
    keep_earlier(sweep.paths, sweep.spec, 0, config, accumulation)
    return [(one.until, one.config) for one in read_earlier(sweep.paths.trial(0))]


def test_changed_configuration_is_kept_with_its_last_step(sweep: MadeSweep) -> None:
    commit(sweep.paths.trial(0), 1, step=10)
    commit(sweep.paths.trial(0), 2, step=20)
    assert _keep(sweep, _config(sweep, batch_size=32)) == [(20, _config(sweep))]


def test_unchanged_configuration_is_not_kept(sweep: MadeSweep) -> None:
    commit(sweep.paths.trial(0), 2, step=20)
    assert _keep(sweep, _config(sweep)) == []
    checkpoint = _config(sweep).checkpoint.model_copy(update={"keep": 9})
    assert _keep(sweep, _config(sweep).model_copy(update={"checkpoint": checkpoint})) == []
    assert not (sweep.paths.trial(0) / EARLIER).exists()


def test_smaller_micro_batches_are_no_change_of_the_spec(sweep: MadeSweep) -> None:
    """The worker has kept the configuration from before it ran out of memory."""
    commit(sweep.paths.trial(0), 2, step=20)
    assert _keep(sweep, _config(sweep, accumulation=2), accumulation=2) == []
    found = _keep(sweep, _config(sweep, accumulation=2, batch_size=32), accumulation=2)
    assert found == [(20, _config(sweep, accumulation=2))]


@pytest.mark.parametrize("content", [None, b"", b"train: 3\n"])
def test_trial_without_a_readable_configuration_starts(
    sweep: MadeSweep, content: bytes | None
) -> None:
    file = sweep.paths.trial(0) / TRIAL_CONFIG
    file.unlink() if content is None else file.write_bytes(content)
    assert _keep(sweep, _config(sweep)) == []
