"""The tree of errors a training run can end with.

    TrainingError                 a run ended, and the reason is known
    ├── ConfigError (ValueError)  the configuration cannot be trained; nothing was started
    ├── TaskError                 the user's task broke its contract
    ├── NonFiniteLoss             the loss became NaN or infinite at a known step
    ├── NonFiniteGradient         the loss was finite, its gradient was not
    ├── NonFiniteMetric           a loop of one's own reported NaN or infinity as its metric
    ├── OutOfMemory               the device's memory did not suffice
    └── CheckpointError           a checkpoint could not be written or read
        ├── AllCheckpointsDamaged every generation failed its digest
        ├── StorageError          the storage is full, read-only, broken or away
        └── Fenced                another process continues this run; this one must not

Every class carries a `kind`: the short word by which ledgers, tags and messages name the reason.
What must not live here: errors about sweeps, specs or tracking.
"""

from __future__ import annotations


class TrainingError(Exception):
    """A training run ended for a reason that is known."""

    kind = "error"


class ConfigError(TrainingError, ValueError):
    """The configuration cannot be trained as it is.

    Args:
        message: What is wrong (the value); the rule; what to write instead.
        key: The dotted path of what it is about, such as `train.precision`, with which the error
            then begins; empty where it is about no single key.
    """

    kind = "config"

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.message = message
        self.key = key


class TaskError(TrainingError):
    """The user's task broke its contract; the message says which part and what to do."""

    kind = "task"


class NonFiniteLoss(TrainingError):
    """The loss became NaN or infinite.

    Args:
        step: The optimizer step (counted from 1) that was not taken.
        value: The loss as it was.
    """

    kind = "non_finite"

    def __init__(self, step: int, value: float) -> None:
        super().__init__(
            f"the loss is {value} at step {step}; no parameter was changed by that step; "
            "lower the learning rate, lengthen the warmup or lower max_norm"
        )
        self.step = step
        self.value = value


class NonFiniteGradient(TrainingError):
    """The loss was finite, but its gradient was NaN or infinite (fp32 and bf16; fp16 skips such
    steps).

    Args:
        step: The optimizer step (counted from 1) that was not taken.
        norm: The global gradient norm as it was.
    """

    kind = "non_finite"

    def __init__(self, step: int, norm: float) -> None:
        super().__init__(
            f"the gradient norm is {norm} at step {step} while the loss is finite; no parameter "
            "was changed by that "
            "step; look for sqrt, log or a division near 0 in the model, or lower the learning "
            "rate"
        )
        self.step = step
        self.norm = norm


class NonFiniteMetric(TrainingError):
    """The metric that decides which state is best became NaN or infinite.

    Args:
        metric: Its name.
        epoch: The report (counted from 1) that carried it.
        value: The metric as it was.
    """

    kind = "non_finite"

    def __init__(self, metric: str, epoch: int, value: float) -> None:
        super().__init__(
            f"{metric} is {value} in report {epoch}; no state is the best by it; lower the "
            "learning rate, lengthen the warmup or clip the gradient"
        )
        self.metric = metric
        self.value = value


class OutOfMemory(TrainingError):
    """The device's memory did not suffice for a step."""

    kind = "oom"


class CheckpointError(TrainingError):
    """A checkpoint could not be written or read."""

    kind = "checkpoint"


class AllCheckpointsDamaged(CheckpointError):
    """Every generation of a run failed its digest; the run never restarts silently at step 0."""


class StorageError(CheckpointError):
    """The storage refused a checkpoint: it is full, read-only, broken or away."""

    kind = "storage"


class WriterReplaced(CheckpointError):
    """Another process continues this run; this one has changed nothing since, and ends."""

    kind = "fenced"
