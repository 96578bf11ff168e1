"""What can only be known by building a run: answers in JSON, in a process of its own.

    python -m trainable.inspect_task [--thorough] < configs.json

reads trial configurations, one to a line. Of the first it prints a line `{"num_parameters": ...}`,
or `{"refused": "why", "key": "train.precision"}` and no more; refused is also what the second, of
the same task, has no steps for. The third, if there is one, is rehearsed, and a second line says
what of the GPU that took (`trainable.memory_probe`). What must not live here: training.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from redaction.secrets import redact
from trainable.config import TaskConfig, TrialConfig
from trainable.errors import ConfigError, TrainingError
from trainable.lazy_imports import without_collection
from trainable.task_import import prepare_process

if TYPE_CHECKING:
    from trainable.data import WindowPlan
    from trainable.precision import Precision


def examine(
    config: TrialConfig, far: TrialConfig | None = None, *, thorough: bool = False
) -> dict[str, Any]:
    """Build the run that `config` describes, as a trial would, and say what it is in numbers.

    Args:
        config: Its configuration.
        far: Another one of the same task, whose steps are counted without building it.
        thorough: Check the whole contract of the task, which builds it several times.

    Raises:
        TrainingError: One of them cannot be built; the message says why.
    """
    from trainable.build import build_parts, check_steps, find_device
    from trainable.built import summarise_data
    from trainable.fingerprint import code_digests
    from trainable.read_back import check_resumable
    from trainable.task import load_loop, load_task
    from trainable.task_checks import quick_check

    if load_loop(config.task.name) is not None:
        # only the loop knows, and asking it would train
        return {"own_loop": True, "code": code_digests(config.task.name)}
    # compiling takes minutes, and says nothing of what is asked here
    plain = config.train.model_copy(update={"compile": False})
    parts = build_parts(config.model_copy(update={"train": plain}), device=find_device(None))
    parts.train.close()
    parts.val.close()
    plans = parts.train.plan, parts.val.plan
    if far is not None:
        check_steps(far, plans[0].samples)
    answer = {
        "code": code_digests(config.task.name) | dict(parts.task.files_read),
        "data": parts.task.fingerprint(parts.data),
        "samples": parts.opened | summarise_data(parts.data, arguments=config.task.arguments),
        "cautions": parts.cautions,
        **measure(config, parts.groups, plans, parts.precision),
    }
    # Both run the model, and so come last. A state that cannot be read back would be found when it
    # is saved; what the first pass makes shows only to whoever looks before it.
    check_resumable(parts)
    answer["checked"] = [*map(redact, quick_check(parts))]
    if thorough:
        from trainable.testing import check_task

        check_task(load_task(config.task.name, config.task.arguments), seed=config.seed)
    return answer


def measure(
    config: TrialConfig,
    groups: list[dict[str, Any]],
    plans: tuple[WindowPlan, WindowPlan],
    precision: Precision,
) -> dict[str, Any]:
    """Say in numbers what a run is.

    Args:
        config: Its configuration.
        groups: The optimizer's parameter groups.
        plans: Its training and validation samples.
        precision: How it computes, and where.
    """
    from trainable.optim import state_bytes, trained
    from trainable.precision import device_name

    parameters = trained(groups)
    train, val = plans
    return {
        "num_parameters": sum(p.numel() for p in parameters),
        "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "optimizer_bytes": state_bytes(config.train.optimizer, parameters),
        "num_train": train.samples,
        "num_val": val.samples,
        "steps_per_epoch": train.windows,
        "total_steps": train.windows * config.budget.epochs,
        "device": device_name(precision.device),
        "precision": precision.name,
    }


def _main() -> None:
    # What a user's module prints, or a library below it, must not end up among the answers.
    with os.fdopen(os.dup(1), "w") as answers:
        os.register_at_fork(after_in_child=answers.close)  # whose end is that of this process'
        os.dup2(2, 1)
        with without_collection():
            import trainable.build  # noqa: F401  torch comes with it
        prepare_process()
        first, far, *others = sys.stdin
        answer = _answer(first, far)
        # at once: whatever happens in a rehearsal, this much is known
        print(json.dumps(answer), file=answers, flush=True)
        if not answer.keys() & {"refused", "own_loop"}:
            for other in others:
                print(json.dumps(_rehearse(other)), file=answers, flush=True)


def _answer(first: str, second: str) -> dict[str, Any]:
    wanted, far = map(TrialConfig.model_validate_json, (first, second))
    try:
        return examine(wanted, far, thorough="--thorough" in sys.argv)
    except ConfigError as error:
        return {"refused": redact(error.message), "key": error.key or "task"}
    except TrainingError as error:
        return {"refused": redact(str(error)), "key": "task"}
    # a user's task may raise anything while it builds its model or data
    except Exception as error:
        return {
            "refused": redact(
                f"'{wanted.task.name}' could not be built ({type(error).__name__}: {error}); its "
                "model and its data are built once before anything is created; correct the task "
                f"or its arguments{_fractions(wanted.task)}"
            ),
            "key": "task",
            "raised": True,
        }


def _fractions(task: TaskConfig) -> str:
    """Name the arguments that are whole numbers written as fractions, as `quniform` draws them."""
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


def _rehearse(config: str) -> dict[str, int | str]:
    from trainable.build import find_device
    from trainable.memory_probe import measure_step

    return measure_step(TrialConfig.model_validate_json(config), find_device(None))


if __name__ == "__main__":
    _main()
