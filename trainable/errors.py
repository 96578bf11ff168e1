"""The tree of errors that can end a training run.

    TrainingError                 a run ended, and the reason is known
    ├── ConfigError (ValueError)  the configuration cannot be trained; nothing was started
    │   └── WithoutEffect         a searched key means nothing to the task, whatever its value
    ├── TaskError                 the user's task broke its contract
    ├── NonFiniteLoss             the loss became NaN or infinite at a known step
    ├── NonFiniteGradient         the loss was finite, its gradient was not
    ├── NonFiniteMetric           a custom loop reported NaN or infinity as its metric
    ├── OutOfMemory               the device ran out of memory
    ├── RankFailed                the user's code raised on another rank of the trial
    ├── RankLost                  another rank of the trial is gone, or did not come in time
    ├── NodeLeaves                a node of the trial is about to be taken away
    └── CheckpointError           a checkpoint could not be written or read
        ├── AllCheckpointsDamaged every generation failed its digest
        ├── StorageError          the storage is full, read-only, broken or unreachable
        └── WriterReplaced        another process has opened this run; this one must stop

Each class has a `kind`: the short word by which the ledger, tags and messages name the reason.
What must not live here: errors about sweeps, specs or tracking.
"""

from __future__ import annotations


class TrainingCaution(UserWarning):
    """What can be trained is probably a mistake."""


class TrainingError(Exception):
    """A training run ended for a reason that is known."""

    kind = "error"
    place: str | None = None
    """File and line of the error on another rank; None: it was raised in this process."""


class ConfigError(TrainingError, ValueError):
    """The configuration cannot be trained as it is."""

    kind = "config"

    def __init__(self, message: str, key: str = "") -> None:
        super().__init__(f"{key}: {message}" if key else message)
        self.message = message
        self.key = key


class WithoutEffect(ConfigError):
    """A searched key has no effect on the task, so that all trials would train alike.

    No value of the key is the cause, so the kind is that of a fault in the task.
    """

    kind = "task"


class TaskError(TrainingError):
    """The user's task broke its contract; the message says which part and what to do."""

    kind = "task"


class NonFiniteLoss(TrainingError):
    """The loss became NaN or infinite."""

    kind = "non_finite"

    def __init__(self, step: int, value: float) -> None:
        super().__init__(
            f"the loss is {value} at step {step}; no parameter was changed by that step; "
            "lower the learning rate, lengthen the warmup or lower max_norm"
        )
        self.step = step
        self.value = value


class NonFiniteGradient(TrainingError):
    """The loss was finite, but its gradient was NaN or infinite.

    This is raised with fp32 and bf16; with fp16, such a step is skipped.
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
    """The metric that decides which state is best became NaN or infinite."""

    kind = "non_finite"

    def __init__(self, metric: str, epoch: int, value: float) -> None:
        super().__init__(
            f"{metric} is {value} in report {epoch}; no state is the best by it; lower the "
            "learning rate, lengthen the warmup or clip the gradient"
        )
        self.metric = metric
        self.value = value


class OutOfMemory(TrainingError):
    """A training step needed more memory than the device has."""

    kind = "oom"


class RankFailed(TrainingError):
    """The user's code raised an exception on another rank of this trial."""


class RankLost(TrainingError):
    """Another rank of this trial is gone, or did not come in time; its code did not fail.

    The trial is no failure of its own: it is tried again, as after the loss of a worker.
    """

    kind = "rank_lost"


class NodeLeaves(TrainingError):
    """A node of this trial is about to be taken away; the trial has saved, and did not fail."""

    kind = "node_leaves"
    text = "a node of the trial is about to be taken away"
    """What the error says, also where Ray passes on no more than its text."""


class CheckpointError(TrainingError):
    """A checkpoint could not be written or read."""

    kind = "checkpoint"


class AllCheckpointsDamaged(CheckpointError):
    """Every generation of a run failed its digest; the run never restarts silently at step 0."""


class StorageError(CheckpointError):
    """The storage could not write or read a checkpoint: full, read-only, broken or unreachable."""

    kind = "storage"


class ForeignCheckpoint(CheckpointError):
    """A run was to resume from a checkpoint that belongs to another user."""


class WriterReplaced(CheckpointError):
    """Another process has opened this run for writing; this one can no longer change it."""

    kind = "fenced"
