"""Answer what a sweep asks about its task, by processes in which no task has run before.

    python -m trainable.check.inspect_task

Standard input has a line, a `CheckRequest` as JSON. So has the reply: the `Findings`, or
`{"refused": "why", "key": "train.precision"}` if the task cannot be trained. Each run is built in
a fork of this process, one after the other. What must not live here: training.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, NoReturn

from redaction.secrets import redact
from trainable.check.findings import CheckRequest, Findings
from trainable.config import TaskConfig, TrialConfig
from trainable.errors import CheckpointError, ConfigError, TaskError, TrainingError
from trainable.process_start import end_with_parent, load_training
from trainable.user_code.task_import import prepare_process

if TYPE_CHECKING:
    from trainable.check.rehearsal import Rehearsal
    from trainable.data import Plan
    from trainable.precision import Precision
    from trainable.report_plan import ReportPlan


class BuildRaised(TaskError):
    """The user's code raised while the task was built."""


def inspect_task(request: CheckRequest) -> Findings:
    """Rehearse a trial of a task, build it once more, and return what both show.

    Raises:
        TrainingError: It cannot be trained.
        ForkEnded: The task ended the process that built it.
    """
    from trainable.check.rehearsal import in_fork, rehearse_all

    # the others cost nothing where the first trial cannot be built
    rehearsed = rehearse_all([request.config, *request.variants])
    found: Findings | TrainingError = in_fork(_built_or_refused, request, quiet=False)
    if isinstance(found, TrainingError):
        raise found
    found = found if found.own_loop else _with_rehearsals(found, rehearsed, request.resumed)
    if request.largest is not None and not found.own_loop:
        found = replace(found, step_memory=_step_memory(request.largest))
    return found


def _with_rehearsals(found: Findings, rehearsed: Sequence[Rehearsal], resumed: bool) -> Findings:
    """Return the findings with those of the rehearsals; raise the first problem."""
    cautions = [one.caution for one in rehearsed if one.caution is not None]
    for one in rehearsed:
        if one.problem is not None:
            if not resumed:
                raise one.problem
            cautions.append(str(one.problem))
    checked = [*found.checked, *map(redact, cautions)]
    found = replace(found, checked=list(dict.fromkeys(checked)))
    size = rehearsed[0].optimizer_bytes
    if size is None:
        return found
    others = found.checkpoint_bytes - (found.optimizer_bytes or 0)
    return replace(found, optimizer_bytes=size, checkpoint_bytes=others + size)


def _built_or_refused(request: CheckRequest) -> Findings | TrainingError:
    """Return what a build and its first batches show, or why the task is refused."""
    try:
        return examine(request)
    except (ConfigError, TaskError, CheckpointError) as error:
        return error
    except TrainingError as error:
        return TaskError(str(error))
    # a user's task may raise anything while it builds its model or data
    except Exception as error:
        task = request.config.task
        return BuildRaised(
            f"'{task.name}' could not be built ({type(error).__name__}: {error}); its "
            "model and its data are built before anything is created; correct the task "
            f"or its arguments{_fractions(task)}"
        )


def examine(request: CheckRequest) -> Findings:
    """Build a run in this process, as a trial does, and compute its first batches."""
    from trainable.build import build_parts, build_step, check_loop
    from trainable.built import summarise_data
    from trainable.check.first_batches import FirstBatches, checkpoint_bytes
    from trainable.check.task_checks import check_stream, quick_check
    from trainable.data import SampledPlan, check_sampler
    from trainable.find_task import default_arguments, load_loop, load_task
    from trainable.optim import builds_own
    from trainable.precision import find_device
    from trainable.ranks import FirstRank
    from trainable.split_sources import check_batch_size_applies, check_steps
    from trainable.streams import StreamSource
    from trainable.user_code.fingerprint import code_digests

    config, name = request.config, request.config.task.name
    if (loop := load_loop(name)) is not None:
        check_loop(config, loop)
        # a custom loop's sizes are known only by running it, which would train
        return Findings(own_loop=True, code=code_digests(name))
    # compiling takes minutes, and loader processes take seconds to start
    loader = config.train.loader.model_copy(update={"num_workers": 0})
    plain = config.train.model_copy(update={"compile": False, "loader": loader})
    started = time.perf_counter()
    parts = build_parts(
        config.model_copy(update={"train": plain}),
        device=find_device(None),
        ranks=FirstRank(config.workers),
    )
    build_seconds = time.perf_counter() - started
    with closing(parts.train), closing(parts.val):
        plans = parts.train.plan, parts.val.plan
        if (longest := request.longest_warmup) is not None:
            check_steps(longest, plans[0], parts.task.tokens_per_sample)
            if longest.train.batch_size != config.train.batch_size:
                check_batch_size_applies(plans[0])
        data = parts.task.fingerprint(parts.data)
        samples = parts.opened | summarise_data(parts.data, arguments=config.task.arguments)
        # As in a run, before the first hook and loss, which may need what it makes.
        step = build_step(parts, plain) if builds_own(parts.task) else None
        if isinstance(parts.train, StreamSource):
            check_stream(parts.train)
        elif isinstance(parts.train.plan, SampledPlan):
            check_sampler(parts.train.plan)
        cautions = quick_check(parts, resumed=request.resumed, workers=config.workers)
        first = FirstBatches(
            parts,
            config,
            step=step,
            workers=config.train.loader.num_workers,
            resumed=request.resumed,
        )
        first.compute()
        sizes = measure(config, parts.groups, plans, parts.reports, parts.precision)
        tried = (config, *request.variants)
        for one in tried:
            _check_schedule(one, sizes["total_steps"], plans[0].windows)
        others = {own: None for one in tried for own in one.own_names}
        found = Findings(
            code=code_digests(name, *others) | dict(parts.task.files_read),
            default_arguments=default_arguments(name),
            data=data,
            samples=samples,
            cautions=parts.cautions,
            checked=[*map(redact, [*cautions, *first.cautions])],
            build_seconds=build_seconds,
            checkpoint_bytes=checkpoint_bytes(
                parts,
                sizes["optimizer_bytes"],
                trained_only=config.checkpoint.parameters == "trained",
            ),
            **sizes,
            **first.costs,
        )
    if request.thorough:
        from trainable.check.testing import check_task

        check_task(load_task(name, config.task.arguments), seed=config.seed, config=config.train)
    return found


def measure(
    config: TrialConfig,
    groups: list[dict[str, Any]],
    plans: tuple[Plan, Plan],
    reports: ReportPlan,
    precision: Precision,
) -> dict[str, Any]:
    """Return the sizes of a run: parameters, bytes, samples and steps.

    A parameter of a lazy module counts from its first batch on, which gives it a shape.
    """
    from torch.nn.parameter import is_lazy

    from trainable.optim import state_bytes, trained
    from trainable.precision import device_name
    from trainable.store.sharded_state import largest_part_bytes

    parameters = [p for p in trained(groups) if not is_lazy(p)]
    train, val = plans
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "shard_bytes": largest_part_bytes(parameters, config.workers),
        "optimizer_bytes": state_bytes(config.train.optimizer, parameters),
        "num_train": train.samples,
        "num_val": val.samples,
        "steps_per_epoch": train.windows,
        "steps_per_report": reports.windows_per_report,
        "total_steps": reports.total_steps,
        "device": device_name(precision.device),
        "precision": precision.name,
    }


def _check_schedule(config: TrialConfig, total_steps: int, steps_per_epoch: int) -> None:
    """Evaluate a trial's schedule, which may be the user's, at some steps."""
    from trainable.schedule import Schedule

    schedule = Schedule(
        config.train.schedule,
        peak=config.train.optimizer.lr,
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        mode=config.modes[0],
        train=config.train,
    )
    for step in (0, total_steps // 2, total_steps - 1):
        schedule.factor(step)


def _fractions(task: TaskConfig) -> str:
    """Name the arguments that are whole numbers in float form, as `quniform` samples them."""
    found = [
        f"{key} is {value}"
        for key, value in task.arguments.items()
        if isinstance(value, float) and value.is_integer()
    ]
    if not found:
        return ""
    return (
        f"; {', '.join(found)}: a whole number is written without a point, and searched with "
        "{int: [low, high], step: n}"
    )


def _step_memory(config: TrialConfig) -> dict[str, Any]:
    """Measure the GPU memory of a step of a trial, in a process of its own."""
    from trainable.check.memory_probe import measure_step
    from trainable.check.rehearsal import ForkEnded, in_fork

    with suppress(ForkEnded):
        found: dict[str, Any] = in_fork(measure_step, config, quiet=False)
        return found
    return {"failed": "ended its process"}


def answer(request: CheckRequest) -> dict[str, Any]:
    """Return the findings, or why the task is refused, as the reply has them."""
    try:
        return asdict(inspect_task(request))
    except ConfigError as error:
        return {"refused": redact(error.message), "key": error.key or "task"}
    except TrainingError as error:
        raised = isinstance(error, BuildRaised)
        return {"refused": redact(str(error)), "key": "task", "raised": raised}


def _end_alike(code: int) -> NoReturn:
    """End this process as the one ended that built the task."""
    if code < 0:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(max(code, 0))


def _main() -> None:
    end_with_parent()  # which may be killed while the task's code blocks
    # Output of the user's module or of a library must not mix with the answer.
    with os.fdopen(os.dup(1), "w") as replies:
        # A forked child must not keep the pipe open: by the pipe's end, the parent knows that
        # this process has ended.
        os.register_at_fork(after_in_child=replies.close)
        os.dup2(2, 1)
        load_training()
        from trainable.check.rehearsal import ForkEnded

        prepare_process()
        request = CheckRequest.model_validate_json(sys.stdin.readline())
        try:
            reply = json.dumps(answer(request))
        except ForkEnded as ended:
            _end_alike(ended.code)
        print(reply, file=replies, flush=True)
        print(file=replies, flush=True)  # the end: what the task left may keep the pipe open


if __name__ == "__main__":
    _main()
