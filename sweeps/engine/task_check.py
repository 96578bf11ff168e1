"""What can only be known by loading the task, asked of a child process.

The command line never imports torch: a child loads the task, builds model and data once, and
answers in JSON. Its memory is gone when it ends. What must not live here: checks that need no
torch (spec, resources).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import PathFinder
from importlib.util import find_spec
from typing import Any

import trainable
from redaction.secrets import redact
from sweeps.config.error_messages import key_path
from sweeps.config.space import Distribution
from sweeps.config.spec import SweepSpec
from sweeps.engine.resources import ResourcePlan, StepMemory
from sweeps.engine.system_limits import shortages
from sweeps.errors import Issue, SpecError, UserError
from sweeps.formatting import format_bytes
from tracking.address import credentials
from trainable.config import TrialConfig
from trainable.errors import ConfigError
from trainable.module_names import hidden_by, hidden_imports
from trainable.task_registry import parts_of

_SECONDS_TO_END = 5.0
"""From its last answer; longer only for the sake of threads that a task has left."""


class TaskRefused(UserError):
    """The task cannot be loaded, or cannot be trained as configured.

    Args:
        spec: The sweep.
        key: What of a trial's configuration it is about; where that is searched, its key in the
            space is meant.
        message: What is wrong; the rule; what to write instead.
        raised: The task raised something of its own, or ended the process; its traceback says
            more than the message.
    """

    def __init__(self, spec: SweepSpec, key: str, message: str, *, raised: bool = False) -> None:
        self.raised = raised
        path = ("space", key) if key in spec.space else key_path(key)
        super().__init__([Issue(path, message)])


@dataclass(frozen=True)
class TaskFacts:
    """What the task is, in numbers; a loop of the user's own keeps them to itself."""

    num_parameters: int = 0
    num_train: int = 0
    num_val: int = 0
    steps_per_epoch: int = 0
    total_steps: int = 0
    device: str = ""
    precision: str = ""
    weight_bytes: int = 0
    optimizer_bytes: int = 0
    own_loop: bool = False
    code: dict[str, str] = field(default_factory=dict)
    """Digests of the task's source files."""
    data: str | None = None
    """What identifies the task's data; None where that cannot be known."""
    samples: dict[str, Any] = field(default_factory=dict)
    """A summary of the task's data: lengths, some items, a collated batch of each split."""
    cautions: list[str] = field(default_factory=list)
    """What can be trained as it is, but is probably not meant, in sentences."""
    checked: list[str] = field(default_factory=list)
    """The same, found by running the task on a few samples."""
    step_memory: StepMemory | None = None
    """What of a GPU a trial takes; None where it was not measured."""

    def lines(self) -> list[str]:
        """The facts in sentences."""
        if self.own_loop:
            return ["a loop of its own: one report for each epoch of the budget"]
        weight, optimizer = (
            count / self.num_parameters for count in (self.weight_bytes, self.optimizer_bytes)
        )
        return [
            f"{self.num_parameters:,} parameters, {2 * weight + optimizer:.3g} bytes per "
            f"parameter (weight {weight:.3g}, gradient {weight:.3g}, optimizer {optimizer:.3g}); "
            f"the optimizer keeps {format_bytes(self.optimizer_bytes)} for them",
            f"{self.num_train:,} training and {self.num_val:,} validation samples",
            f"{self.steps_per_epoch:,} steps per epoch, {self.total_steps:,} in all",
            f"{self.precision} on {self.device}",
        ]


class TaskInspector:
    """A child process that loads the task and builds everything a run would build.

    Where trials are to share GPUs and the spec leaves their share open, it also takes two steps of
    the largest trial that is known, to see what of a GPU that takes.

    It starts at once; `facts` waits for its answer, so that the caller can do something meanwhile.

    Args:
        spec: The sweep.
        plan: What each trial gets if nothing is known of its memory; None for a single run of the
            spec as it stands, outside a sweep.
        thorough: Check the whole contract of the task, too.

    Raises:
        TaskRefused: There is no such task; that much is known without a child.
    """

    def __init__(
        self, spec: SweepSpec, plan: ResourcePlan | None, *, thorough: bool = False
    ) -> None:
        self._spec = spec
        check_names(spec)
        # As its trials see it: their GPUs, and nothing that opens the tracking store.
        environment = dict.fromkeys(credentials(spec.tracking.uri, spec.storage.ledger), "")
        environment["PYTHONBREAKPOINT"] = "0"  # nobody could talk to a debugger there
        if not (plan.gpu if plan else spec.resources.gpu):
            environment["CUDA_VISIBLE_DEVICES"] = ""
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._child = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "trainable.inspect_task",
                *(["--thorough"] if thorough else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,  # no pipe: what a task has started may keep it open
            text=True,
            env={**os.environ, **environment},
            process_group=0,
        )
        if plan is None:
            configs = [spec.trial_config(0, {})] * 2
        else:
            configs = [spec.trial_config(0, spec.example_params()), longest_warmup(spec)]
        if plan is not None and spec.resources.gpu == "auto" and 0 < plan.gpu < 1:
            configs.append(largest_config(spec))
        self._configs = "".join(f"{config.model_dump_json()}\n" for config in configs)

    def terminate(self) -> None:
        """End the child, whether or not it has answered, and what it has started."""
        if not self._complaints.closed:  # the number of its group is then nobody's or another's
            with self._complaints, self._child, contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def facts(self) -> TaskFacts:
        """Wait for the answer.

        Raises:
            TaskRefused: The task cannot be loaded or trained as configured; the message says why.
        """
        printed, complaints = self._ask()
        try:
            answer, *measured = [json.loads(line) for line in printed.splitlines()]
        except ValueError:
            code = f"exit code {self._child.returncode}"
            last = redact((complaints.strip().splitlines() or [code])[-1])
            raise TaskRefused(
                self._spec,
                "task",
                f"'{self._spec.task.name}' ended the process that loaded it ({last}); a task is "
                "built once before anything is created; "
                + ("; ".join(shortages()) or "correct it, or its arguments"),
                raised=True,
            ) from None
        if "refused" in answer:
            raised = answer.get("raised", False)
            raise TaskRefused(self._spec, answer["key"], answer["refused"], raised=raised)
        facts = TaskFacts(**answer)
        if facts.own_loop or self._configs.count("\n") == 2:
            return facts
        memory = measured[0] if measured else {"failed": "ended its process"}
        return replace(facts, step_memory=StepMemory(**memory))

    def _ask(self) -> tuple[str, str]:
        """Return what the child answers, and what it complains of; it is ended, whatever comes."""
        child = self._child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), child.stdin as questions:
                questions.write(self._configs)
            printed = child.stdout.read()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_SECONDS_TO_END)
            self._complaints.seek(0)
            return printed, self._complaints.read()
        finally:
            self.terminate()


def longest_warmup(spec: SweepSpec) -> TrialConfig:
    """Return the trial of `example_params` with the longest warmup of those that are searched,
    where that fits the rest of it.
    """
    space = spec.search_space()

    def value(key: str, distribution: Distribution) -> Any:
        boundary_values = [probe for _, probe in distribution.boundary_values()]
        return max(boundary_values) if key == "train.schedule.warmup" else boundary_values[0]

    point = space.point(value)
    try:
        if space.allows(point):
            return spec.trial_config(0, point)
    except SpecError:
        pass
    return spec.trial_config(0, spec.example_params())


def largest_config(spec: SweepSpec) -> TrialConfig:
    """Return the trial of a sweep that takes most memory, as far as a spec can tell.

    Of each searched number the largest is taken, and of what is known to work the other way round
    the smallest. What a spec cannot tell: which of several words, such as a model's name, stands
    for the largest model (the first is taken), and whether a larger number makes a model smaller,
    as a stride does. Constraints are not asked: who leaves out the largest would be taken for the
    smallest. Where these values do not fit together, those of `example_params` are taken.
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
    """How much memory a value of a searched key asks for, beside its other values."""
    if key == "train.precision":
        return ("fp16", "bf16", "auto", "fp32").index(str(value))
    if key == "train.optimizer.name":
        return value in ("adam", "adamw", "lamb")  # two moments of each parameter
    if not isinstance(value, int | float):
        return 0
    return -value if key in ("train.accumulation", "train.activation_checkpointing") else value


def check_names(spec: SweepSpec) -> None:
    """Refuse what needs no import: a task's module that is not there, or whose name, or that of a
    module beside it that it imports, something else has already.

    Raises:
        TaskRefused: That is so.
    """
    name, here = spec.task.name, os.getcwd()
    try:
        module = parts_of(name)[0]
    except ConfigError as error:
        raise TaskRefused(spec, error.key, error.message) from None
    package = module.partition(".")[0]
    # On a cluster Ray has the working directory before all that is installed there.
    if ours := hidden_by(trainable.__name__, here):
        raise TaskRefused(
            spec,
            "task.name",
            f"'{ours[0]}' stands where every trial looks for the package "
            f"'{trainable.__name__}', which trains it; where a sweep is started nothing else may "
            "have that name; give the file another one, or start from another directory",
        )
    if hidden := hidden_by(package, here):
        raise TaskRefused(spec, "task.name", f"'{name}': {_taken(package, *hidden)}")
    # the second one asks every finder: a package that was installed to be edited lies on no path
    if not package or not (PathFinder.find_spec(package, [here]) or _is_installed(package)):
        raise TaskRefused(
            spec,
            "task.name",
            f"'{name}': there is no module '{package}' in {here} or among the installed "
            "packages; the part before the colon must be importable from where you start; change "
            "the directory, install the package, or correct the name",
        )
    for file, imported, *taken in hidden_imports(module, here):
        raise TaskRefused(
            spec,
            "task.name",
            f"'{name}': {file} imports '{imported}': {_taken(imported, *taken)}",
        )


def _taken(name: str, own: str, other: str) -> str:
    return (
        f"the name '{name}' is the trouble: {other} has it, and {own} is not what is imported "
        "under it; a module of yours has a name that neither Python nor an installed package has; "
        "rename the file, and what imports it"
    )


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # it is loaded, from no file
        return False
