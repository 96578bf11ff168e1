"""`check_task`: check in a test that a task keeps its contract.

`check_task(MyTask())` takes a second or two and needs neither a GPU nor a sweep. What must not
live here: tests of Gradsweep itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from trainable.base_run import check_reported, one_number
from trainable.check.first_batches import EPOCH_METRICS, STEP_METRICS
from trainable.check.task_checks import (
    Untrained,
    first_batch,
    is_mean,
    is_same,
    no_targets,
    uncalled_methods,
)
from trainable.config import ScheduleConfig, TrainConfig
from trainable.data import sample_count
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.forms import batch_problem, mean_problem, output_problem, result_problem
from trainable.hooks import Hooks
from trainable.logged import Log, collecting
from trainable.losses import cross_entropy
from trainable.object_state import ObjectState, run_objects
from trainable.optim import Scalar, builds_own, normalize_groups, optimizer_of
from trainable.seeding import (
    HostRngState,
    derive_seed,
    preserved_host_rng,
    seed_host,
    set_seed,
)
from trainable.splits import is_stream
from trainable.task import Batch, Data, Samples, Task, check_calls, check_data, set_total_steps
from trainable.train_state import check_read_back, check_state, model_state

_SAMPLES = 8  # enough for two halves of a batch, and few enough for a large model on a CPU
_TOTAL_STEPS = 100
"""The length of a run of a task that is checked alone."""
_TOLERANCE = 1e-3  # relative; reordering a float32 sum changes it by far less


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
        config: The section `train` that `build_optimizer` receives; None: the defaults, and a
            constant learning rate.

    Raises:
        TaskError: It does not; the message lists every problem with its remedy.
    """
    with preserved_host_rng():
        wanted = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        config = config or TrainConfig(schedule=ScheduleConfig(name="constant"))
        problems = list(_problems(task, seed, wanted, config))
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise TaskError(f"{type(task).__name__} breaks the contract of a task:\n{listed}")


def _problems(task: Task, seed: int, wanted: Sequence[str], config: TrainConfig) -> Iterator[str]:
    yield from uncalled_methods(task)
    try:
        check_calls(task)
        data = check_data(task.build_data(), task)
    except TaskError as problem:
        yield str(problem)
        return
    set_seed(seed)
    model = task.build_model()
    if not isinstance(model, nn.Module):
        yield (
            f"build_model() returned an object of type {type(model).__name__}; "
            "return a torch.nn.Module"
        )
        return
    if any(p.device.type != "cpu" for p in model.parameters()):
        yield "build_model() placed the model on a device; leave it on the CPU, the loop moves it"
        return
    yield from _initialisation_problems(task, model, seed)
    yield from _group_problems(task, model)
    yield from _data_problems(task, data, seed)
    set_seed(seed)
    try:
        # no halves where `collate` draws random numbers: they would differ from the whole batch
        batch, halves, _ = first_batch(data, "train", _SAMPLES)
    # a user's collate may raise anything; the problems found before are still reported
    except Exception as problem:
        yield f"collating the first samples raised {type(problem).__name__}: {problem}"
        return
    try:
        _begin_run(task, model, config)
    except TaskError as problem:
        yield str(problem)
        return
    # a user's method may raise anything; the problems found before are still reported
    except Exception as problem:
        yield f"build_optimizer() or on_epoch_start() raised {type(problem).__name__}: {problem}"
        return
    try:
        broken = list(_loss_problems(task, model, batch, halves))
        broken += list(_target_problems(task, model, batch)) or [
            problem for problem in _form_problems(task, model, batch) if not broken
        ]
    # a user's loss may raise anything; the problems found before are still reported
    except Exception as problem:
        broken = (
            list(_target_problems(task, model, batch))
            or list(_form_problems(task, model, batch))
            or [f"loss() raised {type(problem).__name__}: {problem}"]
        )
    yield from broken
    trained = _copy(task, model).train()
    modules = run_objects(task, trained, whole_task=False)
    if not broken:  # a broken loss breaks the evaluation, too: report it once
        with collecting(task) as log:
            yield from _training_problems(task, trained, batch, log, config)
            reported = {*STEP_METRICS, *EPOCH_METRICS, *log.take(), *log.take_epoch()}
            log.prefix = "val/"
            val_batch = first_batch(data, "val", _SAMPLES)[0]
            yield from _evaluation_problems(task, model, val_batch, log, reported, wanted)
    yield from _state_problems(task, trained, modules)


def _initialisation_problems(task: Task, model: nn.Module, seed: int) -> Iterator[str]:
    set_seed(seed)
    again = task.build_model()
    if again is model:
        yield "build_model() returned the same model twice; make a new one on each call"
        return
    first, second = model.state_dict(), again.state_dict()
    if first.keys() != second.keys() or not all(
        torch.equal(first[key], second[key]) for key in first if isinstance(first[key], Tensor)
    ):
        yield (
            "build_model() returns other weights under the same seed; draw them from torch's, "
            "NumPy's or Python's global generators, which the run seeds"
        )


def _state_problems(task: Task, model: nn.Module, modules: ObjectState) -> Iterator[str]:
    """Check that a new model accepts the state of a trained one, as a resumed run requires."""
    try:
        check_state(model_state(model), "the model's state_dict()")
        check_read_back(task, model, task.build_model(), modules.state_dict())
    except (TaskError, CheckpointError) as problem:
        yield str(problem)


def _group_problems(task: Task, model: nn.Module) -> Iterator[str]:
    try:
        groups = normalize_groups(task.param_groups(model))
    except TaskError as problem:
        yield str(problem)
        return
    names = {id(p): name for name, p in model.named_parameters()}
    listed = [id(p) for group in groups for p in group["params"]]
    twice = sorted({names.get(key, "?") for key in listed if listed.count(key) > 1})
    missing = [names[id(p)] for p in model.parameters() if p.requires_grad and id(p) not in listed]
    if twice:
        yield f"param_groups() lists {', '.join(twice)} twice; list each parameter once"
    if missing:
        yield (
            f"param_groups() leaves out {', '.join(missing)}; add them, or set "
            "requires_grad_(False) if they are not to be trained"
        )


def _loss_problems(
    task: Task, model: nn.Module, batch: Batch, halves: list[Batch]
) -> Iterator[str]:
    model = _copy(task, model).eval()  # dropout off: two halves must add up to the whole
    result = task.loss(model, batch)
    if (problem := result_problem(result)) is not None:
        yield problem
        return
    total, weight = result
    if not float(weight) > 0:
        yield no_targets(sum(1 for _ in halves) * _SAMPLES // 2 or 1)
        return
    if total.ndim or not total.requires_grad:
        yield (
            "loss() must return a scalar tensor that depends on the model's parameters as its "
            "first part; sum over the batch and do not detach"
        )
        return
    total = total.detach()
    if not math.isfinite(float(total)):
        yield (
            f"loss() gave {float(total):g} with weight {float(weight):g}; the loss must be "
            "finite; check the scale of the inputs and the targets"
        )
        return
    before = HostRngState()
    parts = [(part.detach(), share) for part, share in (task.loss(model, h) for h in halves)]
    if not parts or before.has_changed():  # a loss with random numbers differs each time
        return
    if is_mean((total, weight), parts):
        halved = [float(loss) for loss, _ in parts]
        yield mean_problem(float(total), halved, float(weight))
        return
    for name, whole, pieces in (
        ("sum", total, [part for part, _ in parts]),
        ("weight", weight, [share for _, share in parts]),
    ):
        if not _close(whole, sum(float(piece) for piece in pieces)):
            yield (
                f"loss() of a batch has {name} {float(whole):g}, its two halves add up to "
                f"{sum(float(piece) for piece in pieces):g}; return a sum over samples, not a "
                "mean, and the number of targets as the weight"
            )


def _form_problems(task: Task, model: nn.Module, batch: Batch) -> Iterator[str]:
    """Check the form of the batch and of the model's output for the default loss."""
    if type(task).loss is not Task.loss:
        return
    problem = batch_problem(batch)
    with torch.no_grad(), contextlib.suppress(Exception):  # the caller reports the model's errors
        problem = problem or output_problem(model(batch[0]), batch[1])
    if problem is not None:
        yield problem


def _target_problems(task: Task, model: nn.Module, batch: Batch) -> Iterator[str]:
    """Check for one-hot targets and for probabilities.

    Cross entropy accepts them silently or refuses them with an unhelpful message.
    """
    if not isinstance(batch, (list, tuple)) or len(batch) != 2:
        return
    targets = batch[1]
    with torch.no_grad():
        try:
            output = _copy(task, model).eval()(batch[0])
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return  # the task's own loss() knows how to call this model
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
        plain = cross_entropy(output, batch[1])[0]
        return _close(task.loss(_copy(task, model).eval(), batch)[0], float(plain))
    except Exception:  # other targets, or an error in the task's loss, which is reported elsewhere
        return False


def _data_problems(task: Task, data: Data, seed: int) -> Iterator[str]:
    """Check that samples are the same on each build."""
    set_seed(seed)
    again = check_data(task.build_data(), task)
    for split, first, second in (("train", data.train, again.train), ("val", data.val, again.val)):
        if is_stream(first):  # reading it again is checked before each sweep
            continue
        if sample_count(first) != sample_count(second) or not is_same(
            _seeded(first, seed), _seeded(second, seed)
        ):
            yield (
                f"build_data() returns another {split} split each time; fix its seed, such as "
                "torch.Generator().manual_seed(0); otherwise runs are not comparable"
            )


def _seeded(samples: Samples, seed: int) -> list[Any]:
    """Return the first samples, each fetched under its own seed, as the loop does."""
    if isinstance(samples, tuple):
        return [tensor[:_SAMPLES] for tensor in samples]
    found = []
    for index in range(min(_SAMPLES, len(samples))):  # type: ignore[arg-type]
        seed_host(derive_seed(seed, index))
        found.append(samples[index])  # type: ignore[index]
    return found


def _build_optimizer(task: Task, model: nn.Module, config: TrainConfig) -> list[Tensor]:
    """Build the optimizer if the task has one of its own; return what is trained."""
    groups = normalize_groups(task.param_groups(model))
    if task.total_steps is None:
        set_total_steps(task, _TOTAL_STEPS)
    if builds_own(task):
        groups = optimizer_of(task, model, config, groups).param_groups
    return [p for group in groups for p in group["params"]]


def _begin_run(task: Task, model: nn.Module, config: TrainConfig) -> None:
    """Call what a run calls before its first loss, which may need what that makes."""
    _build_optimizer(task, model, config)
    with collecting(task) as log:
        Hooks(task, log, model, list(model.parameters())).epoch_start(0)


def _training_problems(
    task: Task, model: nn.Module, batch: Batch, log: Log, config: TrainConfig
) -> Iterator[str]:
    untrained = Untrained(task, model, _build_optimizer(task, model, config))
    hooks = Hooks(task, log, model, list(model.parameters()))
    hooks.epoch_start(0)
    untrained.loss(model, batch)[0].backward()
    hooks.step_end(1)
    if untrained.is_suspected:
        untrained.loss(model, batch)
    hooks.epoch_end(0)
    if (problem := untrained.problem()) is not None:
        yield problem
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if len(without) == sum(p.requires_grad for p in model.parameters()):
        yield "no parameter received a gradient; do not detach the model's output in loss()"
    elif without:
        yield (
            f"loss() gives {', '.join(without)} no gradient, so they would never be trained; use "
            "them in forward(), or set requires_grad_(False) on them"
        )


def _evaluation_problems(
    task: Task,
    model: nn.Module,
    batch: Batch,
    log: Log,
    reported: Set[str],
    wanted: Sequence[str],
) -> Iterator[str]:
    model = _copy(task, model).eval()
    with torch.no_grad():
        metrics = task.evaluate(model, iter([batch]))
    if not isinstance(metrics, dict) or not metrics:
        yield f"evaluate() returned {metrics!r}; return a dict of metrics, such as {{'loss': 0.5}}"
        return
    for name, value in metrics.items():
        if not isinstance(name, str) or "/" in name:
            yield f"evaluate() names a metric {name!r}; use a plain name, the loop adds val/"
        try:
            one_number(value, f"evaluate() returned {name!r}")
        except TaskError as problem:
            yield str(problem)
    try:
        check_reported(wanted, reported | {f"val/{name}" for name in metrics} | {*log.take()})
    except ConfigError as problem:
        yield problem.message


def _copy(task: Task, model: nn.Module) -> nn.Module:
    """Return a new model with the weights of `model`; not every model can be deep-copied."""
    new = task.build_model()
    # `_state_problems` reports a state_dict that a new model does not accept
    with contextlib.suppress(RuntimeError, KeyError, ValueError, TypeError):
        new.load_state_dict(model.state_dict())
    return new


def _close(whole: Scalar, parts: float) -> bool:
    return math.isclose(float(whole), parts, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)
