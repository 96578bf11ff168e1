"""Load the task in a child process, check it, and return facts about it.

The command line never imports torch: the child builds model and data once and computes the first
batches. What must not live here: checks that need no torch (`spec`, `resources`).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import trainable
from sweeps.engine import fork_server
from sweeps.engine.resources import ResourcePlan, StepMemory
from sweeps.engine.system_limits import shortages
from sweeps.errors import Issue, SpecError, UserError
from sweeps.formatting import format_bytes
from sweeps.spec.error_messages import is_argument, key_path
from sweeps.spec.space import Distribution
from sweeps.spec.spec import SweepSpec
from sweeps.spec.trial_run import num_threads
from sweeps.stores import withheld_variables
from tracking.child_process import ChildProcess
from trainable.check.findings import CheckRequest, Findings
from trainable.config import TrialConfig
from trainable.errors import ConfigError
from trainable.user_code.module_names import hidden_by, hidden_imports
from trainable.user_code.task_import import resolve_task_name


class TaskRefused(UserError):
    """The task cannot be loaded, or cannot be trained as configured."""

    def __init__(self, spec: SweepSpec, key: str, message: str, *, raised: bool = False) -> None:
        self.raised = raised
        path = ("space", key) if key in spec.space else key_path(key)
        if key == "metric":  # the training does not know which of its metrics only has limits
            limited = (one for one in spec.constraints if message.startswith(f"{one!r} is not"))
            path = next((("constraints", one) for one in limited), path)
        super().__init__([Issue(path, message)])


@dataclass(frozen=True)
class TaskFacts(Findings):
    """Facts about the task; those of a custom loop are unknown."""

    step_memory: StepMemory | None = None
    """The GPU memory that a trial takes; None if it was not measured."""

    def lines(self) -> list[str]:
        """Return the facts in sentences."""
        if self.own_loop:
            return ["a custom loop: one report for each epoch or interval of the budget"]
        return [
            self._memory(),
            f"{_number(self.num_train)} training and {_number(self.num_val)} validation samples",
            f"{_number(self.steps_per_epoch)} steps per epoch, {self.total_steps:,} in all",
            f"{self.precision} on {self.device}",
        ]

    def _memory(self) -> str:
        """Return the number of parameters and what they take, in a sentence."""
        if not self.num_parameters:
            return "parameters of lazy modules, whose sizes are known after the first batch"
        size = 2 * self.weight_bytes + (self.optimizer_bytes or 0)
        found = f"{self.num_parameters:,} parameters: {format_bytes(size)} with gradients"
        if self.optimizer_bytes is None:
            return f"{found}, and what the optimizer keeps, which is known after its first step"
        return f"{found} and the optimizer's state"


def _number(count: int) -> str:
    """Return a number in words; a stream may not tell how long it is."""
    return f"{count:,}" if count else "an unknown number of"


class TaskInspector:
    """Runs a child process that builds all that a run builds and computes its first batches.

    With `gpu: auto` and trials that share GPUs, the child also takes two steps of the largest
    known trial to measure its GPU memory. It starts at once; the caller can work until `facts`.
    """

    def __init__(
        self,
        spec: SweepSpec,
        plan: ResourcePlan | None,
        *,
        thorough: bool = False,
        resumed: bool = False,
    ) -> None:
        self._spec = spec
        check_names(spec)
        # The environment of a trial: its GPUs, and no credentials of the tracking store.
        environment = dict.fromkeys(withheld_variables(spec), "")
        environment["PYTHONBREAKPOINT"] = "0"  # the child has no terminal for a debugger
        if not (plan.gpu if plan else spec.resources.gpu):
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if plan is not None:  # the threads of a trial, whose steps are timed
            environment["OMP_NUM_THREADS"] = os.environ.get(
                "OMP_NUM_THREADS", str(num_threads(plan.cpu))
            )
        if plan is None:
            config = spec.trial_config(0, {})
            request = CheckRequest(config=config, longest_warmup=config, resumed=resumed)
        else:
            measures = spec.resources.gpu == "auto" and 0 < plan.gpu < 1
            request = CheckRequest(
                config=spec.trial_config(0, spec.example_params()),
                longest_warmup=longest_warmup(spec),
                variants=tuple(optimizer_variants(spec)),
                largest=largest_config(spec) if measures else None,
                thorough=thorough,
                resumed=resumed,
            )
        self._child = ChildProcess(
            "trainable.check.inspect_task",
            requests=[request.model_dump_json()],
            environment={**os.environ, **environment},
            launcher=fork_server.launcher(),
        )

    def terminate(self) -> None:
        """Kill the child and its own child processes, if they run."""
        self._child.terminate()

    def facts(self) -> TaskFacts:
        """Wait for the child's answer."""
        try:
            (answer,) = map(json.loads, self._child.reply())
        except ValueError:
            last = self._child.last_words
            raise TaskRefused(
                self._spec,
                "task",
                f"'{self._spec.task.name}' ended the process that loaded it ({last}); a task must "
                "be built before a sweep is created; "
                + ("; ".join(shortages()) or "correct it, or its arguments"),
                raised=True,
            ) from None
        if "refused" in answer:
            raised = answer.get("raised", False)
            raise TaskRefused(self._spec, answer["key"], answer["refused"], raised=raised)
        memory = answer.pop("step_memory")
        return TaskFacts(**answer, step_memory=memory and StepMemory(**memory))


def optimizer_variants(spec: SweepSpec) -> list[TrialConfig]:
    """Return trials with every optimizer, schedule and argument of these that the space names.

    Of a range both ends, the rest as in `example_params`; without those that are not valid
    together.
    """
    found = []
    for key, distribution in spec.space.items():
        named = key in ("train.optimizer.name", "train.schedule.name")
        if not named and not is_argument(key.split(".")):
            continue
        for _, value in distribution.boundary_values():
            forced = {other: allowed[0] for other, allowed in distribution.when} | {key: value}
            point = spec.search_space().point(partial(_forced_or_first, forced))
            with contextlib.suppress(SpecError):
                found.append(spec.trial_config(0, point))
    return found


def _forced_or_first(forced: Mapping[str, Any], key: str, distribution: Distribution) -> Any:
    return forced.get(key, distribution.boundary_values()[0][1])


_LENGTHEN = (
    "train.schedule.warmup",
    "train.schedule.decay",
    "train.ema.start",
    "train.swa.start",
)
"""The searched keys for whose largest value a run may be too short."""


def longest_warmup(spec: SweepSpec) -> TrialConfig:
    """Return the trial of `example_params` with the longest warmup and decay, if that is valid.

    And with the latest start of an average.
    """
    space = spec.search_space()

    def value(key: str, distribution: Distribution) -> Any:
        boundary_values = [probe for _, probe in distribution.boundary_values()]
        return max(boundary_values) if key in _LENGTHEN else boundary_values[0]

    point = space.point(value)
    try:
        if space.allows(point):
            return spec.trial_config(0, point)
    except SpecError:
        pass
    return spec.trial_config(0, spec.example_params())


def largest_config(spec: SweepSpec) -> TrialConfig:
    """Return the trial of a sweep that needs most memory, as far as the spec shows.

    A guess: each number takes its end that needs most, which is wrong where a larger number makes
    a model smaller, as a stride does. Of names the first is used, because the spec does not show
    which is the largest model. If they are not valid together, `example_params` are; constraints
    do not count.
    """

    def heaviest(key: str, distribution: Distribution) -> Any:
        return max(
            (value for _, value in distribution.boundary_values()), key=partial(_weight, key)
        )

    try:
        return spec.trial_config(0, spec.search_space().point(heaviest))
    except SpecError:
        return spec.trial_config(0, spec.example_params())


def _weight(key: str, value: object) -> float:
    """Return a number that ranks the values of a searched key by their memory."""
    if key == "train.precision":
        return ("fp16", "bf16", "auto", "fp32").index(str(value))
    if key == "train.optimizer.name":
        # two moments of each parameter
        return value in ("adam", "adamw", "lamb", "nadam", "radam", "adamax", "adadelta")
    if not isinstance(value, int | float):
        return 0
    return -value if key in ("train.accumulation", "train.activation_checkpointing") else value


def check_names(spec: SweepSpec) -> None:
    """Check, without importing the task, that its module exists and that no names clash."""
    _check_name(spec, "task.name", spec.task.name)
    for key, name in spec.own_names:
        _check_name(spec, key, name)


def _check_name(spec: SweepSpec, key: str, name: str) -> None:
    here = os.getcwd()
    try:
        module = resolve_task_name(name)[0]
    except ConfigError as error:
        raise TaskRefused(spec, error.key, error.message) from None
    package = module.partition(".")[0]
    # On a cluster, Ray puts the working directory before all installed packages.
    if ours := hidden_by(trainable.__name__, here):
        raise TaskRefused(
            spec,
            key,
            f"'{ours[0]}' hides the package '{trainable.__name__}', which trains every trial; no "
            "file in the directory where a sweep starts may have that name; rename the file, or "
            "start from another directory",
        )
    if hidden := hidden_by(package, here):
        raise TaskRefused(spec, key, f"'{name}': {_taken(package, *hidden)}")
    # `_is_installed` uses all finders: an editable package is on no path.
    if not package or not (PathFinder.find_spec(package, [here]) or _is_installed(package)):
        raise TaskRefused(
            spec,
            key,
            f"'{name}': there is no module '{package}' in {here} or among the installed "
            "packages; the part before the colon must be importable from where you start; change "
            "the directory, install the package, or correct the name",
        )
    for file, imported, *taken in hidden_imports(module, here):
        raise TaskRefused(
            spec,
            key,
            f"'{name}': {file} imports '{imported}': {_taken(imported, *taken)}",
        )


def _taken(name: str, own: str, other: str) -> str:
    return (
        f"the name '{name}' is taken: Python imports {other} under it instead of {own}; your "
        "modules need names that neither Python nor an installed package has; rename the file "
        "and its imports"
    )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # loaded, but not from a file
        return False
