"""What a custom loop receives: its configuration and its context, and how its ranks keep in step.

What must not live here: what becomes of what it yields (`custom_loop.py`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel

from trainable import rank_waits
from trainable.base_run import BaseRun, RunReport, errors_reach_ranks
from trainable.checkpoint import NoCheckpoints, NoHistory
from trainable.config import TaskConfig, TrialConfig
from trainable.errors import CheckpointError, ConfigError, TaskError, TrainingError
from trainable.logged import Log, Reduce
from trainable.parallel.loop_group import LoopGroup
from trainable.parallel.rank_group import RankGroup
from trainable.precision import device_name
from trainable.ranks import ALONE, Ranks
from trainable.seeding import derive_seed, set_determinism, set_seed
from trainable.step import translate_torch_errors
from trainable.train_state import check_state
from trainable.user_code.task_code import task_code

Yielded = dict[str, Any] | tuple[dict[str, Any], dict[str, Any] | None]
Function = Callable[[TrialConfig, "Context"], Iterator[Yielded]]

FORMAT = 1
_KEYS = {"format", "loop", "progress"}
_OPTIONAL_KEYS = {"ranks"}


@dataclass(frozen=True)
class Context:
    """What a custom loop needs besides its configuration.

    Attributes:
        directory: The run's directory; files the loop writes there stay with the run.
        seed: The run's seed, for weights and the order of training. Python, NumPy and torch are
            seeded with it before the loop starts.
        epochs: Number of reports after which the whole run ends. With a budget in steps, samples
            or tokens, `config.budget` has them, and the loop counts them itself.
        device: Where to train.
        restored: The state from which the run resumes, as the loop yielded it, with every tensor
            on the CPU; None when the run starts from the beginning. On several ranks it is what
            rank 0 yielded, with this rank's own entry `per_rank`, which a rank that the
            checkpoint has none of lacks.
        epoch: Number of earlier reports; 0 when the run starts from the beginning.
        data_seed: Seed shared by all trials of a sweep. Split the samples and draw validation
            from your own generator with this seed: all trials then use the same data.
        rank: This process among those of the trial, counted from 0; see `resources.workers`.
            What rank 0 yields is the report; the other ranks yield at the same place.
        world_size: The number of processes of the trial. If there are several, the variables of
            torchrun are set, and `torch.distributed.init_process_group()` needs no argument.
    """

    directory: Path
    seed: int
    epochs: int
    device: torch.device
    restored: dict[str, Any] | None = None
    epoch: int = 0
    data_seed: int = 0
    rank: int = 0
    world_size: int = 1
    _log: Log = field(default_factory=Log, repr=False, compare=False)

    def log(
        self,
        name: str,
        value: float | torch.Tensor,
        *,
        reduce: Reduce = "mean",
        weight: float | torch.Tensor | None = None,
    ) -> None:
        """Log a number with the next report; several values before it become their mean or sum.

        Args:
            name: Such as `train/aux_loss`; not a name that the run itself reports.
            value: One number; a tensor stays on its device until the report.
            reduce: `mean` or `sum`.
            weight: The value's weight in the mean, such as the number of targets in the batch.

        Raises:
            TaskError: The name, the value or an option cannot be recorded.
        """
        self._log.add(name, value, reduce=reduce, weight=weight)

    def log_file(self, path: str | Path, name: str | None = None) -> None:
        """Keep a copy of a file with the run; the tracking server receives it when the run ends.

        Args:
            path: The file.
            name: Its path among the run's artifacts; default its own name.
        """
        self._log.add_file(path, name)

    def log_figure(self, name: str, figure: Any) -> None:
        """Keep a Matplotlib figure with the run, as `log_file` does.

        Args:
            name: Its path among the run's artifacts; `.png` is appended where it has no suffix.
            figure: An object with a method `savefig`.
        """
        self._log.add_figure(name, figure)

    def remaining_epochs(self) -> Iterator[int]:
        """Yield the epochs still to be trained, counted from 0.

        Before each epoch, Python, NumPy and torch are seeded from the run's seed and the epoch.
        So shuffling and dropout of a resumed loop are those of one that was never interrupted.
        """
        for epoch in range(self.epoch, self.epochs):
            set_seed(derive_seed(self.seed, "epoch", epoch))
            yield epoch


@dataclass(frozen=True)
class Opening:
    """How a run is opened; `open_trainer` has the meaning of each field."""

    directory: Path
    device: torch.device
    checkpoints: str | None = None
    searched: Collection[str] = ()
    restore: Path | str | None = None
    until: int | None = None
    ranks: Ranks = ALONE
    accept_workers: bool = False


def open_context(
    config: TrialConfig, opening: Opening, saved: dict[str, Any] | None, log: Log
) -> tuple[Context, dict[str, Any]]:
    """Seed every generator, and return what a loop receives, and the progress of its checkpoint.

    All ranks are seeded alike: they draw the same order of samples, and each takes its part.
    `saved` is the checkpoint, which the first rank has read; None: the run is new.
    """
    ranks = opening.ranks
    saved = ranks.broadcast(saved)
    if saved is not None and (
        not _KEYS <= saved.keys() <= _KEYS | _OPTIONAL_KEYS or saved["format"] != FORMAT
    ):
        raise CheckpointError(
            f"the checkpoint holds the keys {sorted(saved)} and is not one of a custom loop in "
            f"format {FORMAT}; continue with the task and the version that wrote it"
        )
    progress: dict[str, Any] = {} if saved is None else saved["progress"]
    set_determinism(config.train.deterministic)
    set_seed(config.seed)
    context = Context(
        directory=opening.directory,
        seed=config.seed,
        epochs=config.budget.reports,
        device=opening.device,
        restored=None
        if saved is None
        else restored_state(saved, ranks, accept_workers=opening.accept_workers),
        epoch=progress.get("epoch", 0),
        _log=log,
        data_seed=config.seed if config.data_seed is None else config.data_seed,
        rank=ranks.rank,
        world_size=ranks.size,
    )
    return context, progress


def begin(function: Function, config: TrialConfig, context: Context) -> Generator[Any, None, None]:
    """Call a loop's function; its code runs from the first `next`."""
    begun = function(config, context)
    if not isinstance(begun, Generator):
        raise TaskError(
            f"{config.task.name} returned an object of type {type(begun).__name__}; it must be a "
            "generator function: yield a dict of metrics after each epoch"
        )
    return begun


class CustomLoopRank(BaseRun):
    """A custom loop on a rank after the first; its directory is that on the first rank."""

    def __init__(self, function: Function, config: TrialConfig, opening: Opening) -> None:
        directory, ranks = opening.directory, opening.ranks
        self._device = device = opening.device
        self._log = Log()  # without a directory: nothing is recorded
        context, _ = open_context(config, opening, None, self._log)
        self._position = context.epoch
        generator = begin(function, record_reads(config)[0], context)
        self._steps = LoopSteps(generator, ranks, config.task.name, device)
        super().__init__(
            store=NoCheckpoints(directory),
            history=NoHistory(directory),
            ranks=ranks,
            resumed_at=context.epoch,
        )

    @property
    def resolved(self) -> dict[str, str]:
        """The device that the loop received."""
        return {"device": device_name(self._device)}

    @property
    def position(self) -> int:
        """Reports made by the first rank."""
        return self._position

    @errors_reach_ranks
    def events(self) -> Iterator[RunReport]:
        """Run the loop until the first rank ends it; yield nothing."""
        while self._ranks.next_report() and self._steps.next() is not EXHAUSTED:
            self._position += 1
            self._log.take()  # else it would grow
        yield from ()

    def _release(self) -> None:
        try:
            self._steps.close()
        finally:
            self._ranks.close()


EXHAUSTED = object()
"""Marks the end of the generator; not None, which a loop may yield by mistake."""
PER_RANK = "per_rank"
"""The entry of a state that each rank has its own of."""


class LoopSteps:
    """A custom loop's generator on one rank."""

    def __init__(
        self,
        generator: Generator[Any, None, None],
        ranks: Ranks,
        name: str,
        device: torch.device,
    ) -> None:
        self._generator, self._ranks, self._name, self._device = generator, ranks, name, device
        self._num_yields = 0  # since this process began
        self._others_wait = ranks.is_first and ranks.size > 1
        self.of_ranks: list[dict[str, Any] | None] = []
        """On the first rank: what each further one keeps with the state yielded last."""
        self._group = LoopGroup(ranks) if isinstance(ranks, RankGroup) else None
        self._met = False  # whether the loop has had a process group at a yield

    def next(self) -> object:
        """Run the loop to its next yield on every rank; return what it yields on this one."""
        if self._group is None:
            return self._run()
        self._tell(go_on=True)
        try:
            yielded = self._run()
            own = _own_part(yielded)
        except Exception as error:
            self._group.fail(error)
        places = self._ranks.gather_plain(
            [yielded is EXHAUSTED, own is not None], seconds=rank_waits.WITHOUT_END
        )
        self._check_place([is_over for is_over, _ in places])
        self.of_ranks = []
        if any(has_own for _, has_own in places):
            states = self._ranks.gather({} if own is None else {PER_RANK: own})
            self.of_ranks = [state.get(PER_RANK) for state in (states or [])[1:]]
        return yielded

    def close(self) -> None:
        """Have all ranks close their generators, which run their `finally` blocks."""
        with contextlib.ExitStack() as stack:
            if self._group is not None:
                stack.callback(self._group.close)
            stack.callback(self._generator.close)
            with contextlib.suppress(TrainingError):  # the group has ended
                self._tell(go_on=False)

    @property
    def trains_apart(self) -> bool:
        """Whether there are several ranks, and at no yield the loop had a process group."""
        return self._group is not None and not self._met

    def _run(self) -> object:
        with translate_torch_errors(self._device), task_code():
            yielded = next(self._generator, EXHAUSTED)
        self._met = self._met or (self._group is not None and self._group.is_used)
        return yielded

    def _tell(self, *, go_on: bool) -> None:
        """Tell the other ranks, which wait at a yield, whether the loop continues."""
        if self._others_wait:
            self._others_wait = False
            self._ranks.next_report(go_on=go_on)

    def _check_place(self, ended: list[bool]) -> None:
        """Refuse a loop that yields more or less often on a rank than on the first one."""
        other = [rank for rank, over in enumerate(ended) if over != ended[0]]
        if other:
            here, there = "has ended", "has yielded again"
            if ended[0]:
                here, there = there, here
            raise TaskError(
                f"{self._name} {here} on rank {other[0]} after {self._num_yields} reports, and "
                f"{there} on rank 0; each rank yields as often as rank 0, which alone reports; "
                "write a yield on every rank, such as `yield {}`"
            )
        self._num_yields += 1
        self._others_wait = self._ranks.is_first and not ended[0]


def _own_part(yielded: object) -> dict[str, Any] | None:
    """Return what this rank keeps of a state."""
    state = yielded[1] if isinstance(yielded, tuple) and len(yielded) == 2 else None
    own = state.get(PER_RANK) if isinstance(state, dict) else None
    if own is None:
        return None
    if not isinstance(own, dict):
        raise TaskError(
            f"the state has an entry {PER_RANK!r} of type {type(own).__name__}; it must be a "
            "dict of what this rank alone has, such as {'generator': generator.get_state()}"
        )
    check_state(own)
    return own


def saved_state(state: dict[str, Any], steps: LoopSteps, ranks: Ranks) -> dict[str, Any]:
    """Return the parts of a checkpoint that hold a loop's state."""
    if ranks.size == 1:
        return {"loop": state}
    of_ranks = steps.of_ranks or [None] * (ranks.size - 1)
    return {"loop": state, "ranks": of_ranks}


def restored_state(
    saved: dict[str, Any], ranks: Ranks, *, accept_workers: bool = False
) -> dict[str, Any]:
    """Return the state from which a rank resumes: the first rank's, with its own part.

    A rank that yielded no such part, or that the run did not have before, gets none.
    """
    state: dict[str, Any] = saved["loop"]
    of_ranks = saved.get("ranks", [])
    before = len(of_ranks) + 1
    if before != ranks.size and not accept_workers:
        raise ConfigError(
            f"{ranks.size}, and the checkpoint is of a run on {before}; what each rank has kept "
            f"for itself is of as many ranks; write workers: {before}, or accept the change",
            key="resources.workers",
        )
    if ranks.is_first:
        return state
    own = of_ranks[ranks.rank - 1] if len(of_ranks) >= ranks.rank else None
    shared = {name: part for name, part in state.items() if name != PER_RANK}
    return shared if own is None else shared | {PER_RANK: own}


class Reads:
    """The dotted keys that were read.

    Attributes:
        keys: A section read as a whole stands for all keys below it.
        missing: Arguments of the task that were read but do not exist.
    """

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.missing: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether a key, one above it or one below it was read."""
        return any(
            f"{key}.".startswith(f"{read}.") or f"{read}.".startswith(f"{key}.")
            for read in self.keys
        )


def record_reads(config: TrialConfig) -> tuple[TrialConfig, Reads]:
    """Return a configuration that records what is read from it, and the record."""
    reads = Reads()
    return cast("TrialConfig", _Recording(config, "", reads)), reads


class _Recording:
    """Stands for a section of the configuration, and records what is read from it.

    To `isinstance` it has the section's class. An attribute that is not a field or a property
    comes from the plain section, and counts as a read of the whole section.
    """

    __slots__ = ("_plain", "_prefix", "_reads", "_sections")
    _plain: BaseModel
    _prefix: str
    _reads: Reads
    _sections: dict[str, Any]

    def __init__(self, plain: BaseModel, prefix: str, reads: Reads) -> None:
        values = {name: getattr(plain, name) for name in type(plain).model_fields}
        sections: dict[str, Any] = {
            name: _Recording(value, f"{prefix}{name}.", reads)
            for name, value in values.items()
            if isinstance(value, BaseModel)
        }
        if isinstance(plain, TaskConfig):
            sections["arguments"] = _Arguments(plain.arguments, prefix, reads)
        for slot, value in zip(self.__slots__, (plain, prefix, reads, sections), strict=True):
            object.__setattr__(self, slot, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._plain)

    def _whole(self) -> BaseModel:
        """Record that all keys of the section were read, and return the plain section."""
        names = (*type(self._plain).model_fields, *(self._plain.model_extra or ()))
        self._reads.keys.update(f"{self._prefix}{name}" for name in names)
        return self._plain

    def __getattr__(self, name: str) -> Any:
        if name in self._sections:
            return self._sections[name]
        plain, kind = self._plain, type(self._plain)
        if name in kind.model_fields or name in (plain.model_extra or ()):
            self._reads.keys.add(f"{self._prefix}{name}")
            return getattr(plain, name)
        found = getattr(kind, name, None)
        if isinstance(found, property) and not hasattr(BaseModel, name):
            assert found.fget is not None
            return found.fget(self)  # it reads fields of this one
        if hasattr(plain, name):
            return getattr(self._whole(), name)
        self._reads.missing.add(f"{self._prefix}{name}")
        return getattr(plain, name)  # raises as the plain section does

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._plain, name, value)  # refuses it

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole())

    def __eq__(self, other: object) -> bool:
        return self._whole() == other

    def __hash__(self) -> int:
        return hash(self._whole())

    def __copy__(self) -> BaseModel:
        return self._whole()

    def __deepcopy__(self, memo: Any) -> BaseModel:
        return self._whole().__deepcopy__(memo)

    def __reduce_ex__(self, _: Any) -> Any:
        return copy.copy, (self._whole(),)

    def __repr__(self) -> str:
        return repr(self._plain)

    def __str__(self) -> str:
        return str(self._plain)


class _Arguments(dict[str, Any]):
    """The task's arguments as a dict that records what is read from it."""

    def __init__(self, arguments: dict[str, Any], prefix: str, reads: Reads) -> None:
        super().__init__(arguments)
        self._prefix, self._reads = prefix, reads

    def record(self, *keys: object) -> None:
        """Record that some keys were read."""
        for key in keys:
            known = dict.__contains__(self, key)
            (self._reads.keys if known else self._reads.missing).add(f"{self._prefix}{key}")

    def __reduce_ex__(self, _: Any) -> Any:
        return dict, (self.copy(),)


def _recorded(name: str, *, reads_all: bool) -> Callable[..., Any]:
    """Return a method of a dict that records what it reads: all keys, or its first argument."""
    method = getattr(dict, name)

    def read(self: _Arguments, *given: Any) -> Any:
        self.record(*(dict.keys(self) if reads_all else given[:1]))
        return method(self, *given)

    return read


for _name in ("__getitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(_Arguments, _name, _recorded(_name, reads_all=False))
_WHOLE = ("__iter__", "keys", "values", "items", "popitem", "copy", "__or__", "__ror__", "__eq__")
for _name in _WHOLE:
    setattr(_Arguments, _name, _recorded(_name, reads_all=True))
