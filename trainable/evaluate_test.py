"""Evaluate a checkpoint on the test data of its task, once training is over.

Nothing else opens test data. What must not live here: which checkpoint is evaluated, and where the
result is recorded (`store/notes.py` has its form).
"""

from __future__ import annotations

import shutil
import tempfile
import time
import warnings
from pathlib import Path

from trainable.build import open_trainer
from trainable.built import BuiltDiffers
from trainable.config import TrialConfig
from trainable.errors import ConfigError, TrainingCaution
from trainable.find_task import load_loop
from trainable.logged import merge_logged
from trainable.loop import Trainer
from trainable.split_sources import SEED
from trainable.step import translate_torch_errors
from trainable.store.manifest import Generation
from trainable.store.notes import RecordedTest
from trainable.streams import StreamPlan
from trainable.user_code.fingerprint import BUILT


def evaluate_test(
    config: TrialConfig,
    generation: Generation,
    *,
    built: Path | None,
    device: str | None = None,
    threads: int | None = None,
) -> RecordedTest:
    """Evaluate a checkpoint on the test data, as a run evaluates on the validation data."""
    name = config.task.name
    if load_loop(name) is not None:
        raise ConfigError(
            f"{name!r} is a custom loop, and only the loop can evaluate its model; write the "
            "model as a Task, or export the weights and evaluate them in a program of your own",
            key="task.name",
        )
    with tempfile.TemporaryDirectory(prefix="sweep-test-") as scratch:
        if built is not None and (built / BUILT).exists():
            shutil.copyfile(built / BUILT, Path(scratch, BUILT))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TrainingCaution)  # nothing is trained here
                trainer = open_trainer(
                    config,
                    Path(scratch),
                    device=device,
                    threads=threads,
                    restore=generation.address,
                    accept_workers=True,  # one process evaluates the weights of any number
                )
        except BuiltDiffers as error:
            raise ConfigError(
                f"builds something else than when the trial was trained ({error.differing}); "
                "samples that are test data now may have been training data then, and another "
                "model is not the one that was selected; undo the change, or accept it with "
                "--accept-changes",
                key="task",
            ) from None
        with trainer:
            assert isinstance(trainer, Trainer), type(trainer)
            with translate_torch_errors(trainer.precision.device):
                metrics, num_samples = _evaluate(trainer, config)
            resolved = trainer.resolved
    return RecordedTest(
        step=generation.step,
        timestamp_ms=time.time_ns() // 1_000_000,
        metrics=metrics,
        checkpoint_step=generation.step,
        epoch=generation.epoch,
        sha256=generation.sha256,
        num_samples=num_samples,
        **resolved,
    )


def _evaluate(trainer: Trainer, config: TrialConfig) -> tuple[dict[str, float], int]:
    """Return the metrics, and how many samples there are."""
    name = type(trainer.task).__name__
    if trainer.held_out is None:
        raise ConfigError(
            f"{name}.build_data() gives no test data; only samples that no trial has used show "
            "how good the chosen trial is; give them, or a function that loads them, beside the "
            "others: return Data(train=..., val=..., test=(inputs, targets))",
            key="task",
        )
    source = trainer.held_out.open(config.train, trainer.precision.device)
    try:
        metrics, logged = trainer.evaluate_on(source, "test", SEED)
    finally:
        source.close()
    plan = source.plan
    num_samples = plan.num_read if isinstance(plan, StreamPlan) else plan.samples
    return merge_logged(metrics, logged, f"{name}.evaluate()"), num_samples
