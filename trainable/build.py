"""From a configuration to a trainer: where configuration meets the objects it describes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainable.built import Summary, check_built, summarise
from trainable.checkpoint import CheckpointStore
from trainable.config import TrainConfig, TrialConfig
from trainable.custom_loop import CustomLoop
from trainable.data import Source, WindowPlan, open_source, sample_count
from trainable.errors import ConfigError, TaskError
from trainable.loop import Trainer
from trainable.memory import tensor_fraction
from trainable.metrics_file import History, read_rows
from trainable.model import prepare_model
from trainable.opened_files import opened_files
from trainable.optim import Clipper, build_optimizer, check_form, check_groups
from trainable.precision import Precision, resolve_precision
from trainable.rules import rules_of, under_rules
from trainable.schedule import Schedule, warmup_steps
from trainable.seeding import derive_seed, set_determinism, set_seed
from trainable.step import Step, translate_torch_errors
from trainable.storage.locate import files_of
from trainable.task import Data, Task, check_data, load_loop, load_task
from trainable.task_import import no_exit
from trainable.task_state import move_modules
from trainable.train_state import TrainState
from trainable.warm_start import with_inheritance


def open_trainer(
    config: TrialConfig,
    directory: Path,
    *,
    checkpoints: str | None = None,
    searched: Collection[str] = (),
    device: str | None = None,
    threads: int | None = None,
    memory_share: float = 1.0,
    task: Task | None = None,
    restore: Path | None = None,
    until: int | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> Trainer | CustomLoop:
    """Build a run, and resume it from the newest valid checkpoint of its directory when there is
    one.

    Seeds every generator and sets determinism and the number of threads for the whole process.

    A task is trained by our loop (`Trainer`); a generator function brings its own (`CustomLoop`).
    Both have `events()`, `close()`, `store` and `resumed_at`.

    Args:
        config: The run, fully resolved.
        directory: The run's directory; holds `checkpoints/` and `metrics.jsonl`.
        checkpoints: Where its checkpoints lie instead, `s3://BUCKET/...`.
        searched: The keys whose values a search gave; a loop of one's own must read them.
        device: Such as `cpu` or `cuda:0`; None takes the first CUDA device, or else the CPU.
        threads: Threads of torch's CPU operations; None leaves them as they are.
        memory_share: Share of a GPU's memory that this process may take; one whose tensors ask
            for more runs out of memory instead of its neighbours on that GPU.
        task: Trained instead of the one that the configuration names.
        restore: Start from this generation (possibly another run's) instead of the directory's
            newest.
        until: The epoch at which this process saves and ends the run, to be continued; None: the
            budget's last. The schedule is that of the whole budget.
        interrupted: Asked after every step; once true, the run saves and `events()` ends there.

    Raises:
        ConfigError: The configuration cannot be trained as it is.
        TaskError: The task broke its contract.
        OutOfMemory: The model or the data does not fit.
        CheckpointError: There are checkpoints, but none that can be used.
    """
    place = find_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if place.type == "cuda":
        total = torch.cuda.get_device_properties(place).total_memory
        torch.cuda.set_per_process_memory_fraction(tensor_fraction(memory_share, total), place)
        torch.cuda.reset_peak_memory_stats(place)  # of this process' trial before
    function = load_loop(config.task.name) if task is None else None
    if function is not None:
        return CustomLoop(
            function,
            config,
            directory,
            checkpoints=checkpoints,
            searched=searched,
            device=place,
            restore=restore,
            until=until,
            interrupted=interrupted,
        )
    with translate_torch_errors(place):
        parts = build_parts(config, device=place, task=task, compare=restore is None)
    for caution in parts.cautions:
        warnings.warn(caution, stacklevel=2)
    train, schedule = config.train, parts.schedule
    step = build_step(parts, train)
    state = TrainState(
        model=step.model,
        optimizer=step.optimizer,
        schedule=schedule,
        precision=step.precision,
        task=parts.task,
        data=parts.data,
    )
    files = files_of(directory, checkpoints)
    store = CheckpointStore(
        directory, config.checkpoint, metric=config.metrics[0], mode=config.modes[0], files=files
    )
    with store.closed_on_error():
        if restore is None:
            saved = with_inheritance(directory, store.resume(), store.set_aside)
        else:
            saved = store.load(restore)
        if parts.summary is not None:
            check_built(directory, parts.summary, resumed=bool(store.generations()))
        if saved is not None:
            state.load_state_dict(saved)
            schedule.set_lr(step.optimizer, state.progress.step)
        progress = state.progress
        interrupted_before = (
            saved is not None and restore is None and progress.epoch < config.budget.epochs
        )
        before_commit = -1 if saved is None else progress.step
        history = History(directory, files, step=before_commit, interrupted=interrupted_before)

    return Trainer(
        step=step,
        state=state,
        train=parts.train,
        val=parts.val,
        store=store,
        history=history,
        epochs=until or config.budget.epochs,
        metric=config.metrics[0],
        mode=config.modes[0],
        also=config.metrics[1:],
        layer_norms_every=train.layer_norms_every,
        measure_device_time=train.measure_device_time,
        earlier=read_rows(directory),
        val_seed=val_seed(config),
        interrupted=interrupted,
    )


@dataclass(frozen=True)
class Parts:
    """What a run is made of before there is an optimizer.

    Attributes:
        task: What is trained.
        data: Its samples.
        model: On its device, with its initial weights.
        groups: The optimizer's parameter groups.
        train: Windows to train on.
        val: Windows to evaluate on.
        schedule: The learning rate at every step.
        precision: How forward and backward passes compute.
        cautions: What can be trained as it is, but is probably not meant, in sentences.
        opened: Files that the task opened and did not name; see `opened_files.py`.
        summary: Of what the task built, where a run is to compare it; see `built.py`.
    """

    task: Task
    data: Data
    model: nn.Module
    groups: list[dict[str, Any]]
    train: Source
    val: Source
    schedule: Schedule
    precision: Precision
    cautions: list[str]
    opened: dict[str, str]
    summary: Summary | None = None


@no_exit("the task, while it was built,", "task")
def build_parts(
    config: TrialConfig,
    *,
    device: torch.device,
    task: Task | None = None,
    compare: bool = False,
) -> Parts:
    """Build what a run is made of, up to the optimizer, and seed every generator.

    The optimizer is left out because the first one of a process imports `torch._dynamo` (3 s),
    which whoever only wants to know what a run would be need not wait for.

    Raises:
        ConfigError: The configuration cannot be trained as it is.
        TaskError: The task broke its contract.
    """
    train = config.train
    set_determinism(train.deterministic)
    precision = Precision(resolve_precision(train.precision, device), device)
    data_seed = data_seed_of(config)
    with opened_files(config.task.name) as opened:
        set_seed(data_seed)
        if task is None:
            task = load_task(config.task.name, config.task.arguments)

        set_seed(data_seed)  # again, so that samples do not depend on what the constructor drew
        data = check_data(task.build_data(), task)
        set_seed(
            config.seed
        )  # again, so that initial weights do not depend on what build_data drew
        built = _build_model(task)
    cautions = list(_cautions(built, data, train))
    compared = rules_of(config.training_rules).compares_built and compare
    workers = train.loader.num_workers > 0
    summary = (
        opened | summarise(task, built, data, arguments=config.task.arguments, apart=workers)
        if compared
        else None
    )
    model = prepare_model(built.to(device), train)
    move_modules(task, data, device)
    train_source, val_source = _open_sources(
        data, train, seed=config.seed, val_seed=val_seed(config) or config.seed, device=device
    )
    with under_rules(config.training_rules):
        groups = check_form(task.param_groups(model))
    check_groups(train.optimizer, groups)
    windows = train_source.plan.windows
    schedule = Schedule(
        train.schedule,
        peak=train.optimizer.lr,
        total_steps=config.budget.epochs * windows,
        steps_per_epoch=windows,
        mode=config.modes[0],
    )
    return Parts(
        task,
        data,
        model,
        groups,
        train_source,
        val_source,
        schedule,
        precision,
        cautions,
        opened,
        summary,
    )


def data_seed_of(config: TrialConfig) -> int:
    """Return the seed under which the task and its data are built."""
    if config.data_seed is None or not rules_of(config.training_rules).shared_data:
        return config.seed
    return config.data_seed


def val_seed(config: TrialConfig) -> int | None:
    """Return the seed under which validation draws, which depends on no trial; None where it goes
    on from what training drew, as runs of the earliest rules do.
    """
    return derive_seed("validation") if rules_of(config.training_rules).shared_data else None


def check_steps(config: TrialConfig, samples: int) -> None:
    """Refuse a configuration that has no steps for so many training samples, or fewer than its
    warmup.

    Raises:
        ConfigError: That is so.
    """
    windows = _train_plan(config.train, samples, config.seed).windows
    warmup_steps(config.train.schedule.warmup, config.budget.epochs * windows)


def build_step(parts: Parts, config: TrainConfig) -> Step:
    """Build the optimizer and what takes its steps; the learning rate is that of the first one."""
    optimizer = build_optimizer(config.optimizer, parts.groups)
    parts.schedule.set_lr(optimizer, 0)
    return Step(
        task=parts.task,
        model=parts.model,
        optimizer=optimizer,
        schedule=parts.schedule,
        precision=parts.precision,
        clipper=Clipper(config.clip),
    )


def find_device(name: str | None) -> torch.device:
    """Return the device of that name; None: the first CUDA device, or else the CPU.

    Raises:
        ConfigError: There is no such device here.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as problem:
        raise ConfigError(f"device is {name!r}; it must be such as 'cpu' or 'cuda:0'") from problem
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device is {name!r}, and this machine has no usable CUDA device; write 'cpu'"
        )
    return device


def _build_model(task: Task) -> nn.Module:
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model() returned an object of type "
            f"{type(model).__name__}; "
            "it must return a torch.nn.Module"
        )
    return model


def _cautions(model: nn.Module, data: Data, config: TrainConfig) -> Iterator[str]:
    if (part := _in_evaluation_mode(model)) is not None:
        yield (
            f"build_model() returned {f'`{part}`' if part else 'the model'} in evaluation mode, "
            "and it is trained as it is: without dropout, and with BatchNorm's statistics as they "
            "are; return model.train(), with single modules in evaluation mode where they are "
            "meant to be"
        )
    for name, collate, split, samples in (
        ("collate", data.collate, "train", data.train),
        ("collate_val", data.collate_val, "val", data.val),
    ):
        if collate is not None and isinstance(samples, tuple):
            yield (
                f"{name} is never called for {split}, which is a tuple of tensors and is indexed "
                "as it is; give torch.utils.data.TensorDataset(*tensors) if samples are to be "
                "collated"
            )
    batch_norms = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    if batch_norms and config.accumulation > 1:
        yield (
            f"accumulation is {config.accumulation} and the model has BatchNorm "
            f"({batch_norms[0]}): its statistics see micro-batches of {config.micro_batch_size} "
            f"samples, not the batch of {config.batch_size}, so the result is not that of the "
            "large batch; use GroupNorm or LayerNorm, or accumulation 1"
        )


def _in_evaluation_mode(model: nn.Module) -> str | None:
    """Return the outermost part that is trained and in evaluation mode, as ready-made models
    come, "" for the whole; None where there is none. Single modules are meant to be.
    """
    for name, module in model.named_modules():
        is_single = name and next(module.children(), None) is None
        if module.training or is_single:
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            return str(name)
    return None


def _train_plan(config: TrainConfig, samples: int, seed: int) -> WindowPlan:
    return WindowPlan(
        samples=samples,
        batch_size=config.batch_size,
        micro_batch_size=config.micro_batch_size,
        seed=seed,
        drop_last=config.loader.drop_last,
    )


def _open_sources(
    data: Data, config: TrainConfig, *, seed: int, val_seed: int, device: torch.device
) -> tuple[Source, Source]:
    micro = config.micro_batch_size
    train_plan = _train_plan(config, sample_count(data.train), seed)
    # Evaluation takes batches of a size that is known to fit, in the data's own order.
    val_plan = WindowPlan(
        samples=sample_count(data.val),
        batch_size=micro,
        micro_batch_size=micro,
        seed=val_seed,
        shuffle=False,
    )
    return (
        open_source(
            data.train,
            train_plan,
            split="train",
            device=device,
            loader=config.loader,
            collate=data.collate_of("train"),
        ),
        open_source(
            data.val,
            val_plan,
            split="val",
            device=device,
            loader=config.loader,
            collate=data.collate_of("val"),
        ),
    )
