"""Build a run in a child process, compute its first batches, and print what it needs, as JSON.

    python -m trainable.check.inspect_task [--thorough] [--resumed] [--whole-steps] [--variants=2]

Standard input has trial configurations of one task, one per line. The first is built, and a line
`{"num_parameters": ...}` describes it. If it cannot be trained, or if the second has too few steps
for its schedule, or if a following variant's optimizer or schedule cannot be used, the only line
is `{"refused": "why", "key": "train.precision"}`. For one more, if there is one, a second line
says how much GPU memory a step takes (`memory_probe.py`). What must not live here: training.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from redaction.secrets import redact
from trainable.config import TaskConfig, TrialConfig
from trainable.errors import ConfigError, TrainingError
from trainable.process_start import end_with_parent, load_training
from trainable.user_code.task_import import prepare_process

if TYPE_CHECKING:
    from trainable.data import Plan
    from trainable.precision import Precision
    from trainable.report_plan import ReportPlan

_THOROUGH, _WHOLE_STEPS, _VARIANTS = "--thorough", "--whole-steps", "--variants="


def inspect_config(
    config: TrialConfig,
    max_warmup_config: TrialConfig | None = None,
    *,
    variants: Sequence[TrialConfig] = (),
    thorough: bool = False,
    resumed: bool = False,
    whole_steps: bool = False,
) -> dict[str, Any]:
    """Build the run that `config` describes, as a trial does, and return its sizes and digests."""
    from trainable.build import build_parts, build_step, check_loop
    from trainable.built import summarise_data
    from trainable.check.first_batches import FirstBatches, checkpoint_bytes
    from trainable.check.rehearsal import rehearse_all
    from trainable.check.task_checks import check_stream, quick_check
    from trainable.data import SampledPlan, check_sampler
    from trainable.find_task import default_arguments, load_loop, load_task
    from trainable.optim import builds_own
    from trainable.precision import find_device
    from trainable.ranks import FirstRank
    from trainable.schedule import Schedule
    from trainable.split_sources import check_batch_size_applies, check_steps
    from trainable.streams import StreamSource
    from trainable.user_code.fingerprint import code_digests

    # before the task is imported here: each of its processes is a fork in which no task has run
    rehearsed = rehearse_all([config, *variants])
    if (loop := load_loop(config.task.name)) is not None:
        check_loop(config, loop)
        # a custom loop's sizes are known only by running it, which would train
        return {"own_loop": True, "code": code_digests(config.task.name)}
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
        if max_warmup_config is not None:
            check_steps(max_warmup_config, plans[0], parts.task.tokens_per_sample)
            if max_warmup_config.train.batch_size != config.train.batch_size:
                check_batch_size_applies(plans[0])
        data = parts.task.fingerprint(parts.data)
        samples = parts.opened | summarise_data(parts.data, arguments=config.task.arguments)
        # As in a run, before the first hook and loss, which may need what it makes. An optimizer
        # of the configuration takes seconds to build, and no task sees it.
        step = build_step(parts, plain) if builds_own(parts.task) else None
        if isinstance(parts.train, StreamSource):
            check_stream(parts.train)
        elif isinstance(parts.train.plan, SampledPlan):
            check_sampler(parts.train.plan)
        cautions = quick_check(parts, resumed=resumed, workers=config.workers)
        first = FirstBatches(
            parts,
            config,
            step=step,
            workers=config.train.loader.num_workers,
            resumed=resumed,
        )
        first.compute()
        if whole_steps:
            first.time_whole_steps(plain)
        sizes = measure(config, parts.groups, plans, parts.reports, parts.precision)
        answer = {
            "code": code_digests(config.task.name) | dict(parts.task.files_read),
            "default_arguments": default_arguments(config.task.name),
            "data": data,
            "samples": samples,
            "cautions": parts.cautions,
            **sizes,
            "build_seconds": build_seconds,
            "checkpoint_bytes": checkpoint_bytes(
                parts,
                sizes["optimizer_bytes"],
                trained_only=config.checkpoint.parameters == "trained",
            ),
        }
        for one in (config, *variants):
            schedule = Schedule(
                one.train.schedule,
                peak=one.train.optimizer.lr,
                total_steps=answer["total_steps"],
                steps_per_epoch=parts.train.plan.windows,
                mode=one.modes[0],
                train=one.train,
            )
            for at in (0, answer["total_steps"] // 2, answer["total_steps"] - 1):
                schedule.factor(at)
        found = [one.caution for one in rehearsed if one.caution is not None]
        for rehearsal in rehearsed:
            if rehearsal.problem is not None:
                if not resumed:
                    raise rehearsal.problem
                found.append(str(rehearsal.problem))
        cautions += dict.fromkeys(first.cautions + found)
        answer |= {"checked": [*map(redact, cautions)], **first.costs}
        size = rehearsed[0].optimizer_bytes
        if size is not None:
            answer["checkpoint_bytes"] += size - answer["optimizer_bytes"]
            answer["optimizer_bytes"] = size
        others = {name: None for one in (config, *variants) for name in one.own_names}
        answer["code"] = code_digests(config.task.name, *others) | answer["code"]
    if thorough:
        from trainable.check.testing import check_task

        task = load_task(config.task.name, config.task.arguments)
        check_task(task, seed=config.seed, config=config.train)
    return answer


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


def _main() -> None:
    end_with_parent()  # which may be killed while the task's code blocks
    # Output of the user's module or of a library must not mix with the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        # A forked child must not keep the pipe open: by the pipe's end, the parent knows that
        # this process has ended.
        os.register_at_fork(after_in_child=answers.close)
        os.dup2(2, 1)
        load_training()
        options = frozenset(sys.argv[1:])  # before `prepare_process`, which hides them
        prepare_process()
        first, second, *rest = sys.stdin
        count = next((int(a.partition("=")[2]) for a in options if a.startswith(_VARIANTS)), 0)
        variants, others = rest[:count], rest[count:]
        answer = _answer(first, second, variants, options)
        # flushed before the memory probe, which may end the process
        print(json.dumps(answer), file=answers, flush=True)
        if not answer.keys() & {"refused", "own_loop"}:
            for other in others:
                print(json.dumps(_probe_memory(other)), file=answers, flush=True)
        print(file=answers, flush=True)  # the end: what the task left may keep the pipe open


def _answer(
    first: str, second: str, further: Sequence[str], options: Collection[str] = ()
) -> dict[str, Any]:
    wanted, max_warmup_config, *variants = map(
        TrialConfig.model_validate_json, (first, second, *further)
    )
    try:
        return inspect_config(
            wanted,
            max_warmup_config,
            variants=variants,
            thorough=_THOROUGH in options,
            resumed="--resumed" in options,
            whole_steps=_WHOLE_STEPS in options,
        )
    except ConfigError as error:
        return {"refused": redact(error.message), "key": error.key or "task"}
    except TrainingError as error:
        return {"refused": redact(str(error)), "key": "task"}
    # a user's task may raise anything while it builds its model or data
    except Exception as error:
        return {
            "refused": redact(
                f"'{wanted.task.name}' could not be built ({type(error).__name__}: {error}); its "
                "model and its data are built before anything is created; correct the task "
                f"or its arguments{_fractions(wanted.task)}"
            ),
            "key": "task",
            "raised": True,
        }


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


def _probe_memory(config: str) -> dict[str, int | str]:
    from trainable.check.memory_probe import measure_step
    from trainable.precision import find_device

    return measure_step(TrialConfig.model_validate_json(config), find_device(None))


if __name__ == "__main__":
    _main()
