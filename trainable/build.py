"""Build a trainer from a configuration: the task, its data, the model, the optimizer, the loop."""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainable.averaging import Average, AveragingPlan, averaging_plan
from trainable.base_run import num_ranks_of
from trainable.batch_norm import (
    batch_norm_cautions,
    check_passes,
    remedy_for_passes,
    synchronize_batch_norm,
)
from trainable.built import Summary, check_built, summarise
from trainable.calls import loop_problem
from trainable.checkpoint import CheckpointStore, NoCheckpoints, NoHistory, ShardStore
from trainable.config import TrainConfig, TrialConfig
from trainable.custom_loop import CustomLoop
from trainable.errors import ConfigError, TaskError, TrainingCaution
from trainable.find_task import load_loop, load_task
from trainable.group_joining import hidden_group
from trainable.loop import RunParts, Trainer
from trainable.loop_context import CustomLoopRank, Opening
from trainable.memory import tensor_fraction
from trainable.model import make_buffers_writable, prepare_model
from trainable.object_state import move_modules
from trainable.optim import Clipper, check_groups, modal_parameters, normalize_groups, optimizer_of
from trainable.parallel.rank_checks import check_built_alike
from trainable.parallel.rank_group import RankGroup
from trainable.parallel.rank_values import build_alike
from trainable.precision import Precision, find_device, resolve_precision
from trainable.rank_waits import WITHOUT_END
from trainable.ranks import ALONE, Ranks, check_dealt
from trainable.report_plan import ReportPlan
from trainable.sample_kinds import has_state, is_stream, length_of
from trainable.schedule import Schedule
from trainable.seeding import derive_seed, set_determinism, set_seed
from trainable.split_sources import HeldOut, check_batch_size_applies, open_sources
from trainable.step import Step, StepParts, translate_torch_errors
from trainable.store.generations import RunFiles
from trainable.store.metrics_file import History, read_rows
from trainable.store.objects import files_of
from trainable.store.shard_files import ShardGroup
from trainable.streams import Source, StreamPlan
from trainable.task import Data, Task, check_calls, check_data, set_total_steps
from trainable.train_state import TrainState
from trainable.user_code.fingerprint import BUILT, opened_files
from trainable.user_code.task_import import listed, no_exit
from trainable.warm_start import open_store


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
    restore: Path | str | None = None,
    until: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    ranks: Ranks = ALONE,
    accept_workers: bool = False,
) -> Trainer | CustomLoop:
    """Build a run; resume it when its directory has a valid checkpoint.

    Seeds every generator and sets determinism and the number of threads for the whole process.

    `Trainer` trains a task; `CustomLoop` runs a generator function, which has a loop of its own.
    Both have `events()`, `close()`, `store` and `resumed_at`.

    Args:
        config: The run, fully resolved.
        directory: The run's directory; holds `checkpoints/` and `metrics.jsonl`.
        checkpoints: Address of the checkpoints, `s3://BUCKET/...`; None: `checkpoints/` in
            `directory`.
        searched: The keys whose values the search suggests; a custom loop must read them.
        device: Such as `cpu` or `cuda:0`; None takes the first CUDA device, or else the CPU.
        threads: Threads of torch's CPU operations; None leaves the number unchanged.
        memory_share: Share of the GPU's memory that this process may use. If it asks for more, it
            alone runs out of memory, and not the other processes on that GPU.
        task: Trained instead of the one that the configuration names.
        restore: Start from this generation, possibly another run's, instead of the newest one of
            `directory`: its directory, or its prefix in an object store.
        until: The report after which the run saves and ends, to be resumed later; None:
            the last one of the budget. The schedule spans the whole budget in either case.
        should_stop: Called after every step; once it returns true, the run saves and `events()`
            ends.
        ranks: This rank of the trial. Each rank opens a trainer of the same configuration and
            iterates over its `events()`.
        accept_workers: Resume from a checkpoint of another number of ranks.

    Raises:
        ConfigError: The configuration cannot be trained.
        TaskError: The task broke its contract.
        OutOfMemory: The model or the data do not fit into memory.
        CheckpointError: There are checkpoints, but none can be used.
    """
    target = find_device(device)
    if threads is not None:
        torch.set_num_threads(threads)
    if target.type == "cuda":
        total = torch.cuda.get_device_properties(target).total_memory
        torch.cuda.set_per_process_memory_fraction(tensor_fraction(memory_share, total), target)
        torch.cuda.reset_peak_memory_stats(target)  # else an earlier trial's peak would remain
    opening = Opening(
        directory,
        target,
        checkpoints=checkpoints,
        searched=searched,
        restore=restore,
        until=until,
        ranks=ranks,
        accept_workers=accept_workers,
    )
    function = load_loop(config.task.name) if task is None else None
    if function is None:
        trainer = _open_task(config, opening, task, should_stop)
        trainer.watch_gpu(target, memory_share)
        return trainer
    check_loop(config, function)
    if not ranks.is_first:
        # has what is used of it: events(), close() and what each run has
        return CustomLoopRank(function, config, opening)  # type: ignore[return-value]
    loop = CustomLoop(function, config, opening, should_stop)
    loop.watch_gpu(target, memory_share)
    return loop


def _open_task(
    config: TrialConfig, opening: Opening, task: Task | None, should_stop: Callable[[], bool]
) -> Trainer:
    """Open the run of a task."""
    directory, target, ranks = opening.directory, opening.device, opening.ranks
    restore = opening.restore
    if config.train.sharding != "none":
        ranks.leave_on_failure()
    with contextlib.ExitStack() as opened:
        with ranks.together(seconds=WITHOUT_END) as message, translate_torch_errors(target):
            compare = restore is None or (directory / BUILT).exists() or ranks.size > 1
            parts = build_parts(config, device=target, task=task, compare=compare, ranks=ranks)
            if "train.batch_size" in opening.searched:
                check_batch_size_applies(parts.train.plan)
            step = build_step(parts, config.train, ranks)
            files = files_of(directory, opening.checkpoints) if ranks.is_first else None
            store, saved = _open_store(
                config, directory, parts, files, restore, is_sharded=step.is_sharded
            )
            opened.enter_context(store.closed_on_error())
            last = opening.until or config.budget.reports
            state = TrainState(
                step,
                parts.train,
                parts.data,
                trained_only=config.checkpoint.parameters == "trained",
                accept_workers=opening.accept_workers,
            )
            digests = [one.digest() for one in state.objects] if ranks.size > 1 else []
            message.own = [parts.summary, last, saved is not None, digests]
        check_built_alike([summary for summary, *_ in message.of_ranks])
        build_alike(state.objects, [digests for *_, digests in message.of_ranks], ranks)
        _, last, resumes, _ = message.of_ranks[0]
        if ranks.is_first:
            made_again = [_made_again(names)] if (names := state.objects[0].made_again()) else []
            for caution in [*parts.cautions, *made_again]:
                warnings.warn(caution, TrainingCaution, stacklevel=3)
        start_together(step, config.seed)
        if step.is_sharded:
            store.shard_group = ShardGroup(files, ranks)
            step.objects = state.objects
        if resumes:
            saved = ranks.broadcast(saved)
            assert saved is not None
            with ranks.together(seconds=WITHOUT_END):
                state.load_state_dict(saved)
                parts.schedule.set_lr(step.optimizer, state.progress.step)
        progress = state.progress
        interrupted_before = (
            saved is not None and restore is None and progress.reports < config.budget.reports
        )
        saved_step = -1 if saved is None else progress.step
        history = (
            NoHistory(directory)
            if files is None
            else History(directory, files, step=saved_step, interrupted=interrupted_before)
        )
    run = RunParts(
        step=step,
        state=state,
        train=parts.train,
        val=parts.val,
        store=store,
        history=history,
        plan=parts.reports,
        earlier=read_rows(directory) if ranks.is_first else (),
        held_out=HeldOut.of(parts.data),
    )
    trainer = Trainer(config, run, last=last, should_stop=should_stop)
    trainer.parts = parts
    trainer.ranks_before = num_ranks_of(saved)
    trainer.resumed_within_epoch = progress.window > 0
    return trainer


def start_together(step: Step, seed: int) -> None:
    """Give each rank the weights of the first one, and random generators of its own.

    Dropout then differs from rank to rank. The first rank draws as a run of one process does.
    """
    ranks, model = step.ranks, step.model
    if ranks.size == 1:
        return
    if any(is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        raise TaskError(
            f"the model has parameters without a shape, of lazy modules, and {ranks.size} ranks "
            "must start with the same weights; give each module its sizes in build_model(), or "
            "train on one rank"
        )
    if not step.is_sharded:
        ranks.copy_from_first([*model.parameters(), *model.buffers()])
    inside = {id(parameter) for parameter in model.parameters()}
    ranks.copy_from_first([p for p in step.parameters if id(p) not in inside])
    ranks.name_parameters(model)
    if not ranks.is_first:
        set_seed(derive_seed(seed, "rank", ranks.rank))


def _open_store(
    config: TrialConfig,
    directory: Path,
    parts: Parts,
    files: RunFiles | None,
    restore: Path | str | None,
    *,
    is_sharded: bool,
) -> tuple[CheckpointStore, dict[str, Any] | None]:
    """Open the run's checkpoints; return them and the state to start from."""
    if files is None:
        return (ShardStore if is_sharded else NoCheckpoints)(directory), None
    store, saved = open_store(config, directory, files, restore, in_shards=is_sharded)
    with store.closed_on_error():
        if parts.summary is not None and (restore is None or (directory / BUILT).exists()):
            resumed = restore is not None or bool(store.generations())
            check_built(directory, parts.summary, resumed=resumed)
    return store, saved


@dataclass(frozen=True)
class Parts:
    """The parts of a run, without its optimizer.

    Attributes:
        model: On its device, with its initial weights.
        cautions: A sentence for each part that can be trained but is probably a mistake.
        opened: Files that the task opened and did not declare (`user_code/fingerprint.py`).
        averaging: None without averaging.
        summary: Of what the task built, compared when the run resumes (`built.py`); None where
            nothing is compared.
    """

    task: Task
    data: Data
    model: nn.Module
    groups: list[dict[str, Any]]
    train: Source
    val: Source
    schedule: Schedule
    reports: ReportPlan
    precision: Precision
    cautions: list[str]
    opened: dict[str, str]
    averaging: AveragingPlan | None
    summary: Summary | None = None


def _made_again(names: Sequence[str]) -> str:
    return (
        f"{listed(names)}: pickle refuses it, and no checkpoint has it; a resumed run has what "
        "the constructors make again, and a run in which another one takes its place is refused; "
        "keep in it nothing that training changes"
    )


@no_exit("the task, while it was built,", "task")
def build_parts(
    config: TrialConfig,
    *,
    device: torch.device,
    task: Task | None = None,
    compare: bool = False,
    ranks: Ranks = ALONE,
) -> Parts:
    """Build the parts of a run, without its optimizer, and seed every generator.

    The first optimizer of a process imports `torch._dynamo`, which takes 3 s. Callers that only
    inspect a run do not need one.
    """
    train = config.train
    set_determinism(train.deterministic)
    precision = Precision(resolve_precision(train.precision, device), device)
    data_seed = config.seed if config.data_seed is None else config.data_seed
    with hidden_group():  # as in the check of a sweep, which has one process
        with opened_files(config.task.name) as opened:
            set_seed(data_seed)
            if task is None:
                task = load_task(config.task.name, config.task.arguments)
            check_calls(task)
            set_seed(data_seed)  # again: samples must not depend on what the constructor drew
            data = check_data(task.build_data(), task)
            set_seed(config.seed)  # again: weights must not depend on what build_data drew
            built = _build_model(task)
        found = list(cautions(built, data, config))
        workers = train.loader.num_workers > 0
        summary = (
            opened | summarise(task, built, data, arguments=config.task.arguments, apart=workers)
            if compare
            else None
        )
    synchronize_batch_norm(built, train, device=device, size=ranks.size)
    model = _prepared(built, task, config, device=device, precision=precision, ranks=ranks)
    move_modules(task, data, device)
    with hidden_group():
        train_source, val_source = open_sources(
            task,
            data,
            config,
            val_seed=derive_seed("validation"),
            device=device,
            ranks=ranks,
        )
    size = max(config.workers, ranks.size)  # a check of a sweep builds in one process
    if isinstance(train_source.plan, StreamPlan) and train_source.plan.batched:
        check_dealt(size, train.accumulation)
    if remedy := remedy_for_passes(train, train_source.plan, size):
        check_passes(train, remedy)
        ranks.expect_unequal_passes(remedy)
    with hidden_group():
        groups = normalize_groups(task.param_groups(model))
    check_groups(train.optimizer, groups)
    reports = ReportPlan(config.budget, train_source.plan, task.tokens_per_sample)
    set_total_steps(task, reports.total_steps)
    windows = train_source.plan.windows
    averaging = averaging_plan(train, total_steps=reports.total_steps, steps_per_epoch=windows)
    schedule = Schedule(
        train.schedule,
        peak=train.optimizer.lr,
        total_steps=reports.total_steps,
        steps_per_epoch=windows,
        mode=config.modes[0],
        train=train,
    )
    return Parts(
        task,
        data,
        model,
        groups,
        train_source,
        val_source,
        schedule,
        reports,
        precision,
        found,
        opened,
        averaging,
        summary,
    )


def _prepared(
    built: nn.Module,
    task: Task,
    config: TrialConfig,
    *,
    device: torch.device,
    precision: Precision,
    ranks: Ranks,
) -> nn.Module:
    """Return a built model as it is trained: on the device, whole or cut among the ranks."""
    if ranks.size > 1:
        make_buffers_writable(built)  # further ranks copy the first one's values into them
    if config.train.sharding == "none":
        return prepare_model(built.to(device), config.train)
    from trainable.parallel.sharding import check_shardable, shard_model  # takes a second

    check_shardable(config, task, built, precision.name)
    if not isinstance(ranks, RankGroup):  # it is not trained here
        return prepare_model(built.to(device), config.train)
    model = prepare_model(built, config.train)
    shard_model(model, task, ranks, device=device, precision=precision.name)
    return model.to(device)  # buffers that no sharded module has


def build_step(parts: Parts, config: TrainConfig, ranks: Ranks = ALONE) -> Step:
    """Build the optimizer and its `Step`; the learning rate is that of the first step."""
    optimizer = optimizer_of(parts.task, parts.model, config, normalize_groups(parts.groups))
    parts.schedule.set_lr(optimizer, 0)
    average = None
    if parts.averaging is not None:
        if modal_parameters(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} evaluates an average of its own (it has train() and "
                "eval()), and the weights are averaged as well; one of the two is enough; remove "
                "train.ema and train.swa, or take another optimizer",
                key="train.optimizer.name",
            )
        inside = {id(p) for p in parts.model.parameters()}
        given = (p for group in optimizer.param_groups for p in group["params"])
        average = Average(parts.model, (p for p in given if id(p) not in inside), parts.averaging)
    made = StepParts(parts.task, parts.model, optimizer, parts.schedule, parts.precision, average)
    if config.sharding == "fsdp" and isinstance(ranks, RankGroup):
        from trainable.parallel.sharded_step import ShardedStep  # takes a second

        return ShardedStep(made, config.clip, ranks, parts.val)
    return Step(made, Clipper(config.clip), ranks)


def _build_model(task: Task) -> nn.Module:
    model = task.build_model()
    if not isinstance(model, nn.Module):
        raise TaskError(
            f"{type(task).__name__}.build_model() returned an object of type "
            f"{type(model).__name__}; "
            "it must return a torch.nn.Module"
        )
    return model


def cautions(model: nn.Module, data: Data, trial: TrialConfig) -> Iterator[str]:
    """Yield a sentence for each part that can be trained but is probably a mistake."""
    config = trial.train
    if (part := _in_evaluation_mode(model)) is not None:
        yield (
            f"build_model() returned {f'`{part}`' if part else 'the model'} in evaluation mode, "
            "and it is trained in that mode: without dropout, and with fixed BatchNorm "
            "statistics; return model.train(), and call eval() only on modules that must stay in "
            "evaluation mode"
        )
    for name, collate, split, samples in (
        ("collate", data.collate, "train", data.train),
        ("collate_val", data.collate_val, "val", data.val),
    ):
        if collate is not None and isinstance(samples, tuple):
            yield (
                f"{name} is never called for {split}: {split} is a tuple of tensors, and tensors "
                "are indexed directly; to have samples collated, give "
                "torch.utils.data.TensorDataset(*tensors)"
            )
    if is_stream(data.train) and not (has_state(data.train) and config.loader.resume != "skip"):
        yield (
            "a resumed run reads the stream train again from the epoch's start and drops the "
            "samples that were trained: after an interruption late in an epoch this takes about "
            "as long as reading the whole epoch; to continue without it, give the stream "
            "state_dict() and load_state_dict(), which return and take {} where it only draws "
            "from the global generators; to refuse such a stream, write "
            "train.loader.resume: exact"
        )
    if is_stream(data.val) and length_of(data.val) is None and trial.budget.val_batches is None:
        yield (
            "val is a stream that does not tell its length, and an evaluation reads it to its "
            "end: if it has no end, the first evaluation never ends; write budget: {val_batches: "
            "50}, or let the stream tell its length by __len__()"
        )
    yield from batch_norm_cautions(model, trial)


def _in_evaluation_mode(model: nn.Module) -> str | None:
    """Return the name of the outermost trained part in evaluation mode, "" for the whole model.

    Pretrained models are often returned in this mode. In a leaf module it is taken as intended.
    """
    for name, module in model.named_modules():
        is_single = name and next(module.children(), None) is None
        if module.training or is_single:
            continue
        if any(parameter.requires_grad for parameter in module.parameters()):
            return str(name)
    return None


def check_loop(config: TrialConfig, function: Callable[..., Any]) -> None:
    """Refuse a function that is no loop, and what only a task can have."""
    if config.checkpoint.parameters != "all":
        raise ConfigError(
            f"{config.checkpoint.parameters}, and {config.task.name} is a custom loop, whose "
            "checkpoints have what it yields; yield only the trained parameters and write all",
            key="checkpoint.parameters",
        )
    if problem := _argument_problem(config, function) or _yield_problem(function):
        raise ConfigError(f"{config.task.name!r} is a function that {problem}", key="task.name")


def _argument_problem(config: TrialConfig, function: Callable[..., Any]) -> str | None:
    """Return why a function cannot take a configuration and a context; None if it can."""
    values = _values(config)
    found = loop_problem(function)
    names = list(inspect.signature(function).parameters) if found else _taken(function)
    if found is None:
        if not any(name in values for name in names):
            return None
        found = f"takes {', '.join(names)}"
    reads = [f" and `{name} = {values[name]}`" for name in names if name in values]
    return (
        f"{found}; a loop is a generator function that receives the trial's configuration and a "
        f"context, and reads its values from them; write `{_head(function)}`{''.join(reads)}, or "
        "name a class that derives from trainable.Task"
    )


def _taken(function: Callable[..., Any]) -> list[str]:
    """Return the names under which a function takes two arguments."""
    try:
        return list(inspect.signature(function).bind(None, None).arguments)
    except ValueError:  # a builtin without a signature
        return []


def _head(function: Callable[..., Any]) -> str:
    return f"def {getattr(function, '__name__', 'run')}(config, context):"


def _values(config: TrialConfig) -> dict[str, str]:
    """Return where a loop reads the values that a function might take, by name."""
    found = dict(_leaves("config.train", config.train.model_dump(exclude={"ema", "swa"})))
    found |= {"epochs": "context.epochs", "device": "context.device", "seed": "context.seed"}
    return found | {key: f"config.task.{key}" for key in config.task.arguments}


def _leaves(path: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each value and its path; of equal names the outermost comes last."""
    for key, value in values.items():
        if isinstance(value, dict) and key != "arguments":
            yield from _leaves(f"{path}.{key}", value)
    for key in values:
        yield key, f"{path}.{key}"


def _yield_problem(function: Callable[..., Any]) -> str | None:
    """Return why a function makes no reports; None if it does, or may."""
    plain = inspect.unwrap(function)
    if not inspect.isroutine(plain) or inspect.isgeneratorfunction(plain):
        return None  # an object is called, and what it returns is looked at then
    rule = "a loop is a generator function, which yields a report after each epoch"
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        return f"is asynchronous; {rule}; write `{_head(plain)}`, without async and await"
    if _hands_on_context(plain):
        return None
    return (
        f"returns and never yields; {rule}; write `for epoch in context.remaining_epochs():` and "
        'in it, instead of return, `yield {"val/loss": loss}, {"model": model.state_dict(), '
        '"optimizer": optimizer.state_dict()}`; see the guide "Your own loop"'
    )


def _hands_on_context(function: Callable[..., Any]) -> bool:
    """Whether a function gives its context to another one, which may yield; true if unknown."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # no source, or a lambda in the midst of a line
        return True
    owners = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    *_, context = _taken(function)  # the second one, or what takes any number of them
    return any(
        isinstance(node, ast.Name) and node.id == context and id(node) not in owners
        for node in ast.walk(tree)
    )
