"""Look at a run in the process that has built it: what a sweep needs to know of its task.

What must not live here: which processes build (`inspect_task.py`), and what is checked of samples
(`task_checks.py`), of first batches (`first_batches.py`) and of a resumed run (`rehearsal.py`).
"""

from __future__ import annotations

import time
from contextlib import closing, suppress
from typing import Any

from torch.nn.parameter import is_lazy

from redaction.secrets import redact
from trainable.build import Parts, build_parts, build_step, check_loop
from trainable.built import summarise_data
from trainable.check.findings import CheckRequest, Findings
from trainable.check.first_batches import FirstBatches, ObservedStep, checkpoint_bytes
from trainable.check.task_checks import check_stream, quick_check
from trainable.check.testing import check_contract
from trainable.config import TaskConfig, TrialConfig
from trainable.data import SampledPlan, check_sampler
from trainable.errors import CheckpointError, ConfigError, TaskError, TrainingError
from trainable.find_task import default_arguments, load_loop, load_task
from trainable.logged import collecting
from trainable.loop import Trainer
from trainable.optim import builds_own, state_bytes, trained
from trainable.precision import Precision, device_name, find_device
from trainable.ranks import FirstRank
from trainable.report_plan import ReportPlan
from trainable.schedule import Schedule
from trainable.split_sources import check_batch_size_applies, check_steps
from trainable.step import Step
from trainable.store.sharded_state import largest_part_bytes
from trainable.streams import Plan, StreamSource
from trainable.user_code.fingerprint import code_digests


class BuildRaised(TaskError):
    """The user's code raised while the task was built."""


def examine_or_refuse(request: CheckRequest) -> Findings | TrainingError:
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
    config, name = request.config, request.config.task.name
    if (loop := load_loop(name)) is not None:
        check_loop(config, loop)
        # a custom loop's sizes are known only by running it, which would train
        return Findings(own_loop=True, code=code_digests(name))
    plain = config.train.in_one_process()
    started = time.perf_counter()
    parts = build_parts(
        config.model_copy(update={"train": plain}),
        device=find_device(None),
        ranks=FirstRank(config.workers),
    )
    seconds = time.perf_counter() - started
    with closing(parts.train), closing(parts.val):
        look = Look(request)
        look.at_build(parts, seconds)
        step = build_step(parts, plain)  # as in a run, before the first hook and loss
        return look.at_batches(parts, step)


class Look:
    """Looks at a run in the process that has built it: at a rehearsal, or at its first batches."""

    def __init__(self, request: CheckRequest) -> None:
        self._request = request
        self._built: dict[str, Any] = {}

    def at_build(self, parts: Parts, seconds: float) -> None:
        """Note what was built, and refuse trials for which it is too short."""
        config, plan = self._request.config, parts.train.plan
        if (longest := self._request.longest_warmup) is not None:
            check_steps(longest, plan, parts.task.tokens_per_sample)
            if longest.train.batch_size != config.train.batch_size:
                check_batch_size_applies(plan)
        self._built = {
            "build_seconds": seconds,
            "data": parts.task.fingerprint(parts.data),
            "samples": parts.opened | summarise_data(parts.data, arguments=config.task.arguments),
        }

    def at_start(self, trainer: Trainer, seconds: float) -> None:
        """Note what was built for a rehearsal, and observe its steps."""
        self.at_build(trainer.parts, seconds)
        workers = self._request.config.train.loader.num_workers
        self._step = trainer._step = ObservedStep(trainer._step, workers)  # type: ignore[assignment]

    def at_end(self, trainer: Trainer) -> Findings | None:
        """Return the findings of a run that was rehearsed; None if something is wrong with it."""
        if isinstance(trainer.parts.train, StreamSource):  # is checked as it was built
            return None
        # a user's code may raise anything, and is then looked at in a process of its own
        with suppress(Exception), collecting(trainer.task):
            first = FirstBatches(trainer.parts, self._request.config, self._step)
            found = self._findings(trainer.parts, first, begun=True)
            return None if found.checked else found
        return None

    def at_batches(self, parts: Parts, step: Step) -> Findings:
        """Compute the first batches of a run, and return all that is found."""
        request = self._request
        first = FirstBatches(parts, request.config, step, resumed=request.resumed)
        return self._findings(parts, first)

    def _findings(self, parts: Parts, first: FirstBatches, *, begun: bool = False) -> Findings:
        request, config = self._request, self._request.config
        name, plans = config.task.name, (parts.train.plan, parts.val.plan)
        if isinstance(parts.train, StreamSource):
            check_stream(parts.train)
        elif isinstance(parts.train.plan, SampledPlan):
            check_sampler(parts.train.plan)
        cautions = quick_check(parts, resumed=request.resumed, workers=config.workers, begun=begun)
        first.compute()
        sizes = measure(config, parts.groups, plans, parts.reports, parts.precision)
        tried = (config, *request.variants)
        for one in tried:
            _check_schedule(one, sizes["total_steps"], plans[0].windows)
        others = {own: None for one in tried for own in one.own_names}
        found = Findings(
            own_optimizer=builds_own(parts.task),
            code=code_digests(name, *others) | dict(parts.task.files_read),
            default_arguments=default_arguments(name),
            cautions=parts.cautions,
            checked=[*map(redact, [*cautions, *first.cautions])],
            checkpoint_bytes=checkpoint_bytes(
                parts,
                sizes["optimizer_bytes"],
                trained_only=config.checkpoint.parameters == "trained",
            ),
            **self._built,
            **sizes,
            **first.costs,
        )
        if request.thorough:
            task = load_task(name, config.task.arguments)
            check_contract(task, config)
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
