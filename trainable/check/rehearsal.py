"""Rehearse before a sweep that a run which is cut in two trains as one in one piece.

A fork of this process trains a few windows across the end of an epoch that is cut short, and saves
on the way. Another one builds everything anew, resumes from that save, and trains the same windows
again. What they save at the end must be equal to the bit. Where it is not, a third one resumes
once more: what differs between two equal continuations is not lost, but never the same. What must
not live here: what a state has (`train_state.py`), and how states differ (`compare_states.py`).
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # each optimizer needs it: imported once, and not in each fork
from torch.nn.parameter import is_lazy

from trainable.build import open_trainer
from trainable.call_in_fork import ForkEnded, in_fork
from trainable.check.compare_states import StateDifference, state_differences
from trainable.check.examine import Look
from trainable.check.findings import Findings
from trainable.checkpoint import CheckpointStore
from trainable.config import OPTIMIZER_DEFAULTS, Interval, OptimizerConfig, TrialConfig, is_own
from trainable.errors import ConfigError, OutOfMemory, StorageError, TaskError, TrainingError
from trainable.find_task import load_loop
from trainable.loop import Trainer
from trainable.optim import OWN_LOOP, builds_own
from trainable.store.snapshot import num_bytes
from trainable.task import Task
from trainable.watch.diagnostics import MEASURED

SECONDS = 20.0
"""After so long a rehearsal is given up: a check must not keep a sweep from starting."""
_MOST_BYTES = 2**29
"""A model with more weights in a checkpoint is not rehearsed: three states lie on the disk and in
memory."""
_EPOCH, _BEFORE, _AFTER = 3, 2, 2
"""Windows of an epoch, before the save, and after it."""
_SHOWN = 3
_OURS = tuple(OPTIMIZER_DEFAULTS)[:6]
_OF_OPTIMIZERS = {
    "state_dict": (
        "its state_dict() raised {said}; a run saves it and is resumed from it; let state_dict() "
        "return a dict with 'state' and 'param_groups', such as that of the optimizer that it "
        "wraps"
    ),
    "load_state_dict": (
        "its load_state_dict() raised {said}; a run is resumed from its state_dict(); let "
        "load_state_dict() take what state_dict() gives"
    ),
    "step": (
        "its zero_grad() or step() raised {said}; a step is one call without a closure, after the "
        "gradients are computed and clipped; {remedy}"
    ),
}
"""What is said of an exception, by the method of an optimizer that has raised it."""


@dataclass(frozen=True)
class _Trained:
    """What a process has to tell of its windows."""

    refusal: TrainingError | None = None
    step: int = 0
    optimizer_bytes: int | None = None
    builds_own: bool = False
    declared: list[str] = field(default_factory=list)
    digests: dict[str, list[str]] = field(default_factory=dict)
    findings: Findings | None = None


@dataclass
class Rehearsal:
    """What a rehearsal has shown: why a run would not resume to the same bits, or what differs."""

    problem: TrainingError | None = None
    caution: str | None = None
    optimizer_bytes: int | None = None
    builds_own: bool = False
    findings: Findings | None = None


def rehearse_all(configs: Sequence[TrialConfig], look: Look | None = None) -> list[Rehearsal]:
    """Rehearse the first of several trials of one task, and the others with unusual optimizers."""
    first, *others = configs
    found, optimizers = [rehearse(first, look=look)], [first.train.optimizer]
    for one in others:
        optimizer = one.train.optimizer
        if optimizer not in optimizers and (found[0].builds_own or is_unusual(optimizer)):
            optimizers.append(optimizer)
            found.append(rehearse(one))
    return found


def is_unusual(config: OptimizerConfig) -> bool:
    """Whether an optimizer is more than one that every release has been tested with."""
    return is_own(config.name) or config.name not in _OURS or bool(config.arguments)


def rehearse(
    config: TrialConfig, make: Callable[[], Task] | None = None, look: Look | None = None
) -> Rehearsal:
    """Train a few windows in one piece and in two, in processes of their own, and compare.

    `look` looks at the first run, in its process.

    Costs two builds and at most six windows, one after the other. A run of which this takes longer
    than `SECONDS` is not rehearsed, nor one that cannot train its first windows on one rank.
    """
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as name:
        directory = Path(name)
        train = partial(_in_time, time.monotonic() + SECONDS, _alone(config), directory, make)
        first = train(look)
        if first is None or first.refusal is not None or first.step <= _BEFORE:
            return Rehearsal(None if first is None else first.refusal)
        found = Rehearsal(None, None, first.optimizer_bytes, first.builds_own, first.findings)
        whole = _taken_back(directory)
        again = train()
        if again is None or again.refusal is not None:
            found.problem = None if again is None else again.refusal
            return found
        resumed = _taken_back(directory)
        differing = [*state_differences(whole, resumed, ignored=MEASURED)]
        if not differing:
            return found
        third = train()
        if third is None or third.refusal is not None:
            return found
        repeated = _taken_back(directory)
        random = [*state_differences(resumed, repeated, ignored=MEASURED)]
        noted = {one.entry for one in random}
        lost = [one for one in differing if one.entry not in noted and _counts(one, first)]
        if any(_counts(one) for one in random):
            found.caution = _unsteady(random[0])
        elif lost:
            found.problem = _refused(lost[0], first, again, third)
    return found


def _in_time(deadline: float, *arguments: Any) -> _Trained | None:
    """Train in a fork; return None if that ends its process or is late."""
    with contextlib.suppress(ForkEnded):
        found: _Trained | None = in_fork(_train, *arguments, deadline=deadline)
        return found
    return None


def _alone(config: TrialConfig) -> TrialConfig:
    """Return a configuration for one process that saves after the first windows."""
    changes = {"sharding": "none", "deterministic": True}
    every = Interval(count=_BEFORE, unit="step")
    return config.model_copy(
        update={
            "train": config.train.in_one_process().model_copy(update=changes),
            "checkpoint": config.checkpoint.model_copy(update={"every": every, "keep": 9}),
            "workers": 1,
            "patience": None,
        }
    )


def _train(
    config: TrialConfig,
    directory: Path,
    make: Callable[[], Task] | None,
    look: Look | None = None,
) -> _Trained | None:
    """Train to the end of the rehearsal, from the save in the directory if there is one."""
    resumes, saving = any(directory.iterdir()), False
    trainer: Any = None
    try:
        if make is None and load_loop(config.task.name) is not None:
            return None
        started = time.perf_counter()
        trainer = open_trainer(config, directory, task=make and make())
        assert isinstance(trainer, Trainer)
        if look is not None:
            look.at_start(trainer, time.perf_counter() - started)
        saves_all = config.checkpoint.parameters == "all"
        weights = (p for p in trainer.model.parameters() if not is_lazy(p))
        if sum(p.nbytes for p in weights if saves_all or p.requires_grad) > _MOST_BYTES:
            return None
        state_dict = trainer.state.state_dict

        def saved() -> dict[str, Any]:
            nonlocal saving
            saving = True
            state = state_dict()
            saving = False
            return state

        trainer.state.state_dict = saved  # type: ignore[method-assign]
        trainer.shorten(_EPOCH, _BEFORE + _AFTER)
        for _ in trainer.events():
            pass
        trainer.store.wait()
        state, step = state_dict(), trainer.state.progress.step
        objects, task = trainer.state.objects[0], type(trainer.task)
        builds, optimizer = builds_own(trainer.task), config.train.optimizer
        digests = objects.compared()
        declared = objects.declared()
        if task.state_dict is not Task.state_dict:
            declared.append(f"{task.__name__}.state_dict()")
        return _Trained(
            step=step,
            optimizer_bytes=(
                num_bytes(state["optimizer"]) if builds or is_unusual(optimizer) else None
            ),
            builds_own=builds,
            declared=declared,
            digests=digests,
            findings=look.at_end(trainer) if look is not None and step > _BEFORE else None,
        )
    # A user's code may raise anything.
    except Exception as error:
        if isinstance(error, (OutOfMemory, StorageError)):
            return None
        refusal = _of_optimizer(error, config, trainer)
        if isinstance(error, ConfigError) and error.key.startswith("train.optimizer"):
            refusal = error
        if refusal is None and (saving or resumes):
            refusal = error if isinstance(error, ConfigError) else TaskError(str(error))
            if not isinstance(error, TrainingError):
                refusal = TaskError(
                    f"{'a save' if saving else 'a run that is resumed'} raised "
                    f"{type(error).__name__}: {error}; a run is saved and resumed at any step; "
                    "correct what its methods save and restore"
                )
        return None if refusal is None else _Trained(refusal)


def _of_optimizer(
    error: BaseException, config: TrialConfig, trainer: Trainer | None
) -> TrainingError | None:
    """Return what is wrong with the optimizer that has raised an exception, if one has."""
    problem: BaseException | None = error
    while problem is not None:
        for frame, _ in traceback.walk_tb(problem.__traceback__):
            method = frame.f_code.co_name.replace("zero_grad", "step")
            owner = frame.f_locals.get("self")
            if method in _OF_OPTIMIZERS and isinstance(owner, torch.optim.Optimizer):
                said = f"{type(problem).__name__}: {problem}"
                # one that does not look at its closure calls None
                closure = "closure" in said or "'NoneType' object is not callable" in said
                remedy = OWN_LOOP if closure else "correct it, or its options"
                text = _OF_OPTIMIZERS[method].format(said=said, remedy=remedy)
                if trainer is not None and builds_own(trainer.task):
                    return TaskError(f"build_optimizer(): {text}")
                name = config.train.optimizer.name
                return ConfigError(f"{name!r}: {text}", key="train.optimizer.name")
        problem = problem.__cause__
    return None


def _taken_back(directory: Path) -> dict[str, Any]:
    """Return the last state in a directory, and remove what was saved after the first windows."""
    store = CheckpointStore(directory)
    state = store.load(store.generations()[-1])
    for generation in store.generations():
        if generation.step > _BEFORE:
            shutil.rmtree(generation.path)
    return state


def _counts(found: StateDifference, first: _Trained | None = None) -> bool:
    """Whether a difference is none of metrics, which a clock may measure, or of what was noted.

    What objects keep is written otherwise by a run that has resumed: where a tensor got its size
    late, all of it. So a difference in it alone counts only if an object says what is saved.
    """
    if found.entry.startswith("objects"):
        return first is not None and bool(first.declared)
    return not found.entry.startswith("progress")


def _refused(
    found: StateDifference, first: _Trained, again: _Trained, third: _Trained
) -> TrainingError:
    """Return the error for a difference between a run in one piece and one that was resumed."""
    names = [
        name.split(" ")
        for name, told in again.digests.items()
        if told[1] != first.digests.get(name, told)[1]
        and told == third.digests.get(name)
        and not name.endswith(" Tensor")
    ]
    what = f"{found.entry} {found.what}"
    if names:
        path, kind, *attribute = names[0]
        what = f"{'.'.join([path, *attribute])} (of a {kind}) is another one"
    if first.declared:
        listed = "; ".join(first.declared[:_SHOWN])
        remedy = (
            f"what says itself what is saved of it is {listed}: let its methods (state_dict() and "
            "load_state_dict(), __getstate__() and __setstate__(), __reduce__()) save and restore "
            "all that changes in training, and with the same types, or remove them"
        )
    else:
        remedy = (
            "what changes in a file, in another process or within a library is not saved; keep "
            "it in attributes, or let state_dict() and load_state_dict() of the task save it"
        )
    text = (
        f"{what} {_AFTER} steps after a save, if the run is resumed from it; a resumed run must "
        f"train to the same bits; {remedy}"
    )
    of_optimizer = all(one.startswith("optimizer") for one in first.declared or [""])
    is_named = of_optimizer and not first.builds_own
    return ConfigError(text, key="train.optimizer.name") if is_named else TaskError(text)


def _unsteady(found: StateDifference) -> str:
    return (
        f"{found.entry} {found.what} when the same steps were taken twice from the same "
        "checkpoint; a run is resumed and repeated to the same bits only if its steps are the "
        "same each time; draw random numbers from the global generators or from one with a seed, "
        "and let nothing depend on the time, the process, what training writes to a file, or the "
        "order of a set"
    )
