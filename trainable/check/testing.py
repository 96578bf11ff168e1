"""`check_task`: check in a test that a task keeps its contract.

`check_task(MyTask())` takes a second or two and needs neither a GPU nor a sweep. It refuses what
the check of a sweep refuses or warns of, and what makes no difference to a resumed run. What must
not live here: tests of Gradsweep itself, and checks that build a task once (`task_checks.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from trainable.build import Parts, build_parts, build_step
from trainable.check.first_batches import FirstBatches
from trainable.check.task_checks import first_batch, quick_check, uncalled_methods
from trainable.config import (
    BudgetConfig,
    Mode,
    ScheduleConfig,
    TaskConfig,
    TrainConfig,
    TrialConfig,
)
from trainable.errors import ConfigError, TaskError, TrainingError
from trainable.evaluation import evaluation_mode
from trainable.losses import cross_entropy
from trainable.seeding import preserved_host_rng
from trainable.store.snapshot import snapshot
from trainable.task import Batch, Task
from trainable.train_state import TrainState
from trainable.user_code.fingerprint import differences

_SAMPLES = 8  # enough for two halves of a batch, and few enough for a large model on a CPU
_TOTAL_STEPS = 100_000
"""The length of a run of a task that is checked alone; longer than any warmup."""
_TOLERANCE = 1e-3  # relative; reordering a float32 sum changes it by far less
_CPU = torch.device("cpu")


def check_task(
    task: Task,
    *,
    seed: int = 0,
    metrics: str | Sequence[str] = (),
    config: TrainConfig | None = None,
) -> None:
    """Check that a task keeps its contract, on the CPU and with a few of its samples.

    Its methods are called in the order of a run.

    Args:
        task: An instance of the task.
        seed: Seed of all random numbers.
        metrics: Metrics that it must report, such as `val/accuracy`.
        config: The section `train` that `build_optimizer` receives; None: the defaults, with
            batches of 8 samples and a constant learning rate.

    Raises:
        TaskError: It does not; the message lists every problem with its remedy.
    """
    wanted = (metrics,) if isinstance(metrics, str) else tuple(metrics) or ("train/loss",)
    constant = ScheduleConfig(name="constant")
    mode: Mode = "min"
    trial = TrialConfig(
        task=TaskConfig(name=f"{type(task).__module__}:{type(task).__qualname__}"),
        metric=wanted,
        mode=(mode,) * len(wanted),
        budget=BudgetConfig(epochs=None, steps=_TOTAL_STEPS, report_every=_TOTAL_STEPS),
        train=config or TrainConfig(batch_size=_SAMPLES, schedule=constant),
        seed=seed,
    )
    check_contract(task, trial)


def check_contract(task: Task, config: TrialConfig) -> None:
    """Check that a task keeps its contract, in a run of this configuration on the CPU."""
    alone = {"precision": "auto", "sharding": "none", "sync_batch_norm": False}
    train = config.train.in_one_process().model_copy(update=alone)
    config = config.model_copy(update={"train": train, "workers": 1})
    with preserved_host_rng(), _preserved_determinism():
        problems = list(dict.fromkeys(_problems(task, config)))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise TaskError(f"{type(task).__name__} breaks the contract of a task:\n{listed}")


@contextlib.contextmanager
def _preserved_determinism() -> Iterator[None]:
    mode, cudnn = torch.get_deterministic_debug_mode(), torch.backends.cudnn
    deterministic, benchmark = cudnn.deterministic, cudnn.benchmark
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        cudnn.deterministic, cudnn.benchmark = deterministic, benchmark


def _problems(task: Task, config: TrialConfig) -> Iterator[str]:
    yield from uncalled_methods(task)
    try:
        parts = build_parts(config, device=_CPU, task=task, compare=True)
        yield from _left_out(parts)
        step = build_step(parts, config.train)
        first, state = FirstBatches(parts, config, step), TrainState(step, parts.train, parts.data)
    # a user's methods may raise anything; the problems found before are still reported
    except Exception as problem:
        yield _said("building it", problem)
        return
    with contextlib.closing(parts.train), contextlib.closing(parts.val):
        broken = []
        try:
            broken += quick_check(parts)
            first.compute()
        except (TaskError, ConfigError) as problem:
            broken.append(_said("its first batches", problem))
        yield from broken + first.cautions
        yield from _target_problems(parts)
        yield from _evaluation_problems(first.reported)
        if not broken and not first.cautions:
            yield from _without_gradient(parts.model)
        try:
            yield from _build_problems(config, parts, state)
        # as above
        except Exception as problem:
            yield _said("building it a second time", problem)


def _said(what: str, problem: Exception) -> str:
    if isinstance(problem, TrainingError):
        return problem.message if isinstance(problem, ConfigError) else str(problem)
    return f"{what} raised {type(problem).__name__}: {problem}"


def _left_out(parts: Parts) -> Iterator[str]:
    listed = {id(p) for group in parts.groups for p in group["params"]}
    names = [
        name
        for name, p in parts.model.named_parameters()
        if p.requires_grad and id(p) not in listed
    ]
    if names:
        yield (
            f"param_groups() leaves out {', '.join(names)}; add them, or set "
            "requires_grad_(False) if they are not to be trained"
        )


def _target_problems(parts: Parts) -> Iterator[str]:
    """Check for one-hot targets and for probabilities.

    Cross entropy accepts them silently or refuses them with an unhelpful message.
    """
    task, model = parts.task, parts.model
    with torch.no_grad(), evaluation_mode(model):
        try:
            inputs, targets = batch = first_batch(parts.data, "train", _SAMPLES)[0]
            output = model(inputs)
        # the first batches report it, or the task's own loss() knows how to call this model
        except Exception:
            return
        if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or output.ndim < 2:
            return
        if type(task).loss is Task.loss and _is_one_hot(targets, output):
            yield (
                f"the targets are one-hot, of shape {tuple(targets.shape)}; give class indices of "
                f"shape {(len(targets), *targets.shape[2:])}, such as targets.argmax(dim=1)"
            )
        elif _is_probabilities(output) and _is_cross_entropy(task, model, batch, output):
            yield (
                "the model's output is probabilities (each row sums to 1), and cross entropy "
                "applies a softmax itself; return raw logits, without softmax"
            )


def _is_one_hot(targets: Tensor, output: Tensor) -> bool:
    if targets.shape != output.shape or output.shape[1] < 2:
        return False
    zero_or_one = (targets == 0) | (targets == 1)
    return bool(zero_or_one.all()) and bool((targets.sum(dim=1) == 1).all())


def _is_probabilities(output: Tensor) -> bool:
    if output.shape[1] < 2 or not output.is_floating_point() or bool((output < 0).any()):
        return False
    sums = output.sum(dim=1)
    return torch.allclose(sums, torch.ones_like(sums), rtol=0.0, atol=_TOLERANCE)


def _is_cross_entropy(task: Task, model: nn.Module, batch: Batch, output: Tensor) -> bool:
    """Return whether the task's loss equals the cross entropy of this output."""
    try:
        plain, own = cross_entropy(output, batch[1])[0], task.loss(model, batch)[0]
    except Exception:  # other targets, or an error in the task's loss, which is reported elsewhere
        return False
    return math.isclose(float(own), float(plain), rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def _without_gradient(model: nn.Module) -> Iterator[str]:
    names = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if names:
        yield (
            f"loss() gives {', '.join(names)} no gradient, so they would never be trained; use "
            "them in forward(), or set requires_grad_(False) on them"
        )


def _build_problems(config: TrialConfig, parts: Parts, state: TrainState) -> Iterator[str]:
    """Build the task again: it must build the same, and accept the state of the first one."""
    try:
        saved = snapshot(state.state_dict())
    except TrainingError as problem:
        yield str(problem)
        return
    other = config.model_copy(update={"data_seed": (config.data_seed or config.seed) + 1})
    again = build_parts(other, device=_CPU, task=parts.task, compare=True)
    with contextlib.closing(again.train), contextlib.closing(again.val):
        if again.model is parts.model:
            yield "build_model() returned the same model twice; make a new one on each call"
            return
        differing = differences(parts.summary or {}, again.summary or {})
        for split in ("train", "val"):
            if any(name.startswith(split) for name in differing):
                yield (
                    f"build_data() returns another {split} split each time; fix its seed, such as "
                    "torch.Generator().manual_seed(0); otherwise runs are not comparable"
                )
        if any(name.startswith("model") for name in differing):
            yield (
                "build_model() returns other weights under the same seed; draw them from torch's, "
                "NumPy's or Python's global generators, which the run seeds"
            )
        if not differing:
            try:
                step = build_step(again, config.train)
                TrainState(step, again.train, again.data).load_state_dict(saved)
            except TrainingError as problem:
                yield str(problem)


def _evaluation_problems(reported: set[str]) -> Iterator[str]:
    """Check for metrics that have the prefix twice, of `evaluate()` and of the loop."""
    for name in sorted(reported):
        if name.startswith("val/val/"):
            yield (
                f"evaluate() names a metric {name.removeprefix('val/')!r}; use a plain name, the "
                "loop adds val/"
            )
