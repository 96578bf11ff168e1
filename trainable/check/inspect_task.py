"""Answer what a sweep asks about its task, by processes in which no task has run before.

    python -m trainable.check.inspect_task

Standard input has a line, a `CheckRequest` as JSON. So has the reply: the `Findings`, or
`{"refused": "why", "key": "train.precision"}` if the task cannot be trained. Each run is built in
a fork of this process, one after the other. What must not live here: training.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from redaction.secrets import redact
from trainable.check.findings import CheckRequest, Findings
from trainable.config import TrialConfig
from trainable.errors import ConfigError, TrainingError
from trainable.process_start import end_with_parent, load_training
from trainable.processes.attempt_process import end_like
from trainable.user_code.task_import import prepare_process

if TYPE_CHECKING:
    from trainable.check.rehearsal import Rehearsal


def inspect_task(request: CheckRequest) -> Findings:
    """Rehearse a trial of a task, and return what that shows.

    A rehearsal in which all is well is the only build of the first process. Else, and for what one
    process cannot rehearse, the run is built once more, to say what is wrong with it.

    Raises:
        TrainingError: It cannot be trained.
        ForkEnded: The task ended the process that built it.
    """
    from trainable.call_in_fork import in_fork
    from trainable.check.examine import Look, examine_or_refuse
    from trainable.check.rehearsal import rehearse_all

    config = request.config
    is_alike = config.workers == 1 and config.train.sharding == "none"
    look = Look(request) if is_alike and config.train.deterministic else None
    rehearsed = rehearse_all([config, *request.variants], look)
    first = rehearsed[0]
    found: Findings | TrainingError | None = first.findings
    if found is None or first.problem is not None:  # which may have a simpler cause
        found = in_fork(examine_or_refuse, request, quiet=False)
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


def _step_memory(config: TrialConfig) -> dict[str, Any]:
    """Measure the GPU memory of a step of a trial, in a process of its own."""
    from trainable.call_in_fork import ForkEnded, in_fork
    from trainable.check.memory_probe import measure_step

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
        from trainable.check.examine import BuildRaised

        raised = isinstance(error, BuildRaised)
        return {"refused": redact(str(error)), "key": "task", "raised": raised}


def _main() -> None:
    end_with_parent()  # which may be killed while the task's code blocks
    # Output of the user's module or of a library must not mix with the answer.
    with os.fdopen(os.dup(1), "w") as replies:
        # A forked child must not keep the pipe open: by the pipe's end, the parent knows that
        # this process has ended.
        os.register_at_fork(after_in_child=replies.close)
        os.dup2(2, 1)
        load_training()
        from trainable.call_in_fork import ForkEnded, keep_to_one_thread

        keep_to_one_thread()
        prepare_process()
        request = CheckRequest.model_validate_json(sys.stdin.readline())
        try:
            reply = json.dumps(answer(request))
        except ForkEnded as ended:
            end_like(ended.code)
        print(reply, file=replies, flush=True)
        print(file=replies, flush=True)  # the end: what the task left may keep the pipe open


if __name__ == "__main__":
    _main()
