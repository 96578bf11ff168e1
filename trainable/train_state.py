"""TrainState: everything that an exact resume needs, as one `state_dict()`.

It has the model, parameters trained outside it, optimizer, schedule, loss scale, counters,
position in the data and best value. It also has the random generators of torch (CPU and every CUDA
device), NumPy and Python. `torch.load(weights_only=True)` accepts all its types.
What must not live here: files (`checkpoint.py`).
"""

from __future__ import annotations

import io
import random
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trainable.base_run import BestSoFar, describe
from trainable.errors import CheckpointError, ConfigError, TaskError
from trainable.logged import Sums, combined
from trainable.model import make_buffers_writable
from trainable.object_kinds import signatures_once, tensor_signature
from trainable.object_state import ObjectState, run_objects
from trainable.optim import OptimizerState, evaluated_weights, members, modal_parameters
from trainable.step import Step
from trainable.store.snapshot import snapshot
from trainable.streams import Source
from trainable.task import Batch, Data, Task
from trainable.user_code.fingerprint import tensor_digest
from trainable.user_code.task_import import listed

FORMAT = 3
"""Of a state; others are not read."""

_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size)
_RANKS = "ranks"
"""The entry with what differs on the ranks after the first: a list, absent with one rank."""
_EPOCH_START = "epoch_start"
"""The entry with the data as the epoch's loader processes have them; absent if as built."""
_SUMS = "sums"
_TRAINED = "trained_weights"
"""The entry with the weights in training, if the optimizer evaluates others: `model` has those."""


@dataclass
class TrainProgress(BestSoFar):
    """The counters and last metrics of a run: plain values, saved and restored unchanged."""

    step: int = 0
    """Optimizer steps taken."""
    epoch: int = 0
    """Epochs completed."""
    window: int = 0
    """Windows of the current epoch consumed, skipped ones included."""
    reports: int = 0
    """Reports made."""
    since_report: int = 0
    """Windows consumed since the last report, skipped ones included."""
    batch_size: int = 0
    """Samples in each window; 0 before the first one."""
    samples: int = 0
    """Samples trained on."""
    skipped: int = 0
    """Windows whose fp16 gradients overflowed."""
    skipped_in_a_row: int = 0
    """Windows skipped since the last optimizer step."""
    clipped: int = 0
    """Steps with a clipped gradient since the last report."""
    reported_step: int = 0
    """Steps taken at the last report."""
    evaluated: list[str] = field(default_factory=list)
    """Names of the metrics that `evaluate()` returned; empty before it was called."""
    epoch_begun: bool = False
    """Whether the task's `on_epoch_start` was called for the current epoch."""
    epoch_samples: int = 0
    """Samples of the data set when the current epoch began; 0 between epochs, and of a stream."""
    drawing: dict[str, list[bool]] = field(default_factory=dict)
    """What of each split has drawn random numbers so far; see `data.Source`."""
    sums: Sums = field(default_factory=dict)
    """Sums over the current epoch of what the task logs; tensors where they lie on a device."""


class TrainState:
    """The state of one run, read from and restored into the objects that hold it."""

    def __init__(
        self,
        step: Step,
        train: Source | None = None,
        data: Data | None = None,
        *,
        trained_only: bool = False,
        accept_workers: bool = False,
    ) -> None:
        task, model, optimizer = step.task, step.model, step.optimizer
        self._layout = layout = step.layout
        self._position = None if train is None else train.position
        self.epoch_start = None if train is None else EpochStart(train, data)
        self._ranks, self._accept_workers = step.ranks, accept_workers
        self.progress = TrainProgress()
        self._model = model
        self._optimizer = optimizer
        self._optimizer_state = OptimizerState(optimizer)
        self._modal = modal_parameters(optimizer)
        inside = {id(p) for p in model.parameters()}
        self._outside = nn.ParameterList(
            p for group in optimizer.param_groups for p in group["params"] if id(p) not in inside
        )
        self._schedule, self._precision, self._average = (
            step.schedule,
            step.precision,
            step.average,
        )
        self._task, self._data = task, data
        self._was_read_back = False
        trained = [*model.parameters(), *self._outside]
        internals = [] if layout is None else layout.internals()
        self._base = FrozenBase(model, task.files_read) if trained_only else None
        own = type(task).state_dict is not Task.state_dict
        self.objects: list[ObjectState] = [
            run_objects(
                task,
                model,
                trained=[*trained, *internals],
                data=data,
                optimizers=members(optimizer),
                whole_task=not own,
            )
        ]
        """What is saved of the run besides weights, buffers and moments.

        A task with a `state_dict()` of its own says itself what matters of it.
        """
        if own and step.ranks.size > 1:  # what ranks exchange of it; a save has its `state_dict()`
            name = {"own": type(task).__name__}
            self.objects.append(ObjectState({"own": task}, left_out={"": type(task)}, names=name))

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Its tensors are not copies: copy or write them before the next step.

        Every rank calls this at the same step. The first one returns the state of all.
        """
        own = self._own_state()
        others = self._ranks.gather({**own, _SUMS: self.progress.sums})
        if others is None and self._layout is None:  # the first rank saves it
            return own
        more: dict[str, Any] = {_RANKS: others[1:]} if others and len(others) > 1 else {}
        more |= {"outside": self._outside.state_dict()} if self._outside else {}
        more |= {} if self._average is None else {"average": self._average.state_dict()}
        more |= {key: own[key] for key in ("position", _EPOCH_START) if key in own}
        more |= self._weights()
        if self._base is not None:
            more["model"], more["base"] = self._base.split(more["model"])
        if not self._was_read_back and not any(map(is_lazy, self._model.parameters())):
            self._was_read_back = True
            check_loading(self._model)
        state = more | {
            "format": FORMAT,
            "objects": own["objects"],
            "task": own["task"],
            "optimizer": self._optimizer_state.state_dict(),
            "schedule": self._schedule.state_dict(),
            "scaler": self._precision.state_dict(),
            "progress": asdict(self.progress),
            "random": own["random"],
        }
        return state if self._layout is None else self._layout.taken_apart(state)

    def _own_state(self) -> dict[str, Any]:
        """Return what differs from rank to rank."""
        declared = {} if self._task is None else self._task.state_dict()
        check_state(declared, "the state of the task")
        position = {} if self._position is None else {"position": self._position.state_dict()}
        with signatures_once():
            begun = {} if self.epoch_start is None else self.epoch_start.state_dict()
            position |= {_EPOCH_START: begun} if begun else {}
            objects = self.objects[0].state_dict()
        return position | {"objects": objects, "task": declared, "random": capture_random()}

    def _weights(self) -> dict[str, Any]:
        """Return the model's state, and the weights in training if it has others."""
        if not self._modal:
            return {"model": model_state(self._model)}
        with evaluated_weights(self._optimizer):
            evaluated = {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in model_state(self._model).items()
            }
        trained = {str(index): p.detach() for index, p in enumerate(self._modal)}
        return {"model": evaluated, _TRAINED: trained}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, from any device onto the one in use.

        The optimizer's options stay as built: a run may resume with the moments of another run and
        with other hyperparameters. CUDA random generators are restored only if the number of
        devices is the same. On another kind of device the data order is the same, dropout is not.
        """
        if state.get("format") != FORMAT:
            raise CheckpointError(
                f"the state has format {state.get('format')}; this version reads {FORMAT}; use "
                "the version that wrote it, or start a new run"
            )
        if self._layout is not None:
            state = self._layout.restored(state)
        # Without one in the state, averaging begins now; without averaging, it ends now.
        average, base, others = state.get("average"), state.get("base"), state.get(_RANKS, [])
        state = {**state, "average": None, "base": None}
        state.pop(_RANKS, None)
        _check_keys("the state", state, self._expected_keys() | (state.keys() & {_EPOCH_START}))
        weights = completed(self._model, state["model"], base)
        progress = state["progress"]
        _check_keys("the progress", progress, set(asdict(TrainProgress())))
        own = self._own_part(state, others)
        if self._position is not None:
            self._position.load_state_dict(own["position"])
        if self.epoch_start is not None and _EPOCH_START in own:
            self.epoch_start.load_state_dict(own[_EPOCH_START], progress)
        # before the buffers that it registers
        self.objects[0].load_state_dict(own["objects"])
        try:
            load_model_state(self._model, weights)
            self._outside.load_state_dict(state.get("outside", {}), strict=True)
            self._optimizer_state.load_state_dict(state["optimizer"])
            with torch.no_grad():
                for index, parameter in enumerate(self._modal):
                    parameter.copy_(state[_TRAINED][str(index)])
            if self._average is not None and average is not None:
                self._average.load_state_dict(average)
        except (RuntimeError, ValueError, KeyError) as problem:
            raise CheckpointError(
                f"the checkpoint does not fit the model or the optimizer ({problem}); continue "
                "with the code, the version and the configuration that wrote it, or start a new "
                "run"
            ) from problem
        if self._task is not None:
            self._task.load_state_dict(own["task"])
        self._schedule.load_state_dict(state["schedule"])
        self._precision.load_state_dict(state["scaler"])
        self.progress = TrainProgress(**progress)
        self.progress.sums = own.get(_SUMS, self.progress.sums)
        if "random" in own:
            restore_random(own["random"])

    def _own_part(self, state: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the part of a state that belongs to this rank.

        A rank that the run did not have before has the first rank's part, without its random
        generators and sums. So it also has what the task has collected on that rank, and what was
        collected on a rank that is no more is lost: none of its attributes says what it counts.
        """
        before, now = len(others) + 1, self._ranks.size
        if before != now and not self._accept_workers:
            collected = (
                "; what the task collects on each rank in the epoch, of which it has trained a "
                "part, is then counted otherwise"
            )
            raise ConfigError(
                f"{now}, and the checkpoint is of a run on {before}; a run resumes bit for bit on "
                "as many ranks as it had, and on another number it is equal up to rounding"
                f"{collected if state['progress'].get('window') else ''}; write "
                f"workers: {before}, or accept the change",
                key="resources.workers",
            )
        rank = self._ranks.rank
        if rank == 0:
            # what ranks logged that are no more
            lost = [other[_SUMS] for other in others[now - 1 :]]
            return {**state, _SUMS: combined([state["progress"].get(_SUMS, {}), *lost])}
        if rank <= len(others):
            return others[rank - 1]
        return {**{key: state[key] for key in state if key != "random"}, _SUMS: {}}

    def _expected_keys(self) -> set[str]:
        expected = {"format", "model", "optimizer", "schedule", "scaler", "progress", "random"}
        expected |= {"objects", "task", "average", "base"}
        expected |= {_TRAINED} if self._modal else set()
        expected |= {"outside"} if self._outside else set()
        return expected | ({"position"} if self._position is not None else set())


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return a model's state dict, after a check that torch can load all of it."""
    state = model.state_dict()
    extra = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    if extra and not _can_load(extra):
        check_state(extra, "the model's state")
        raise CheckpointError(
            f"the model's state has {', '.join(extra)}, which torch does not read back without "
            "running code; let get_extra_state() return tensors and plain data"
        )
    return state


def _can_load(state: dict[str, Any]) -> bool:
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # objects of the user may raise anything
        return False
    return True


def check_loading(model: nn.Module) -> None:
    """Check that a model can load its own state, before its first checkpoint relies on it.

    Changes nothing. Whether a newly built model has the same parameters and buffers is known
    without building one.
    """
    try:
        load_model_state(model, model_state(model))
    except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as problem:
        raise _unreadable(problem) from problem


def _unreadable(problem: Exception) -> TaskError:
    return TaskError(
        f"the model's state cannot be read back into a new model of build_model() ({problem}); a "
        "run saves it and is resumed from it; build in build_model() every parameter and buffer "
        "that the model will have, and let load_state_dict() take what state_dict() gives"
    )


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load a model's state dict, even into buffers that are expanded views."""
    make_buffers_writable(model)
    model.load_state_dict(state, strict=True)


def check_state(state: object, where: str = "state") -> None:
    """Check that `torch.load(weights_only=True)` can load a state."""
    if isinstance(state, Mapping) and type(state) in (dict, OrderedDict, Counter):
        for key, value in state.items():
            check_state(key, f"a key of {where}")
            check_state(value, f"{where}[{key!r}]")
    elif type(state) in (list, tuple):
        for index, value in enumerate(state):  # type: ignore[arg-type]
            check_state(value, f"{where}[{index}]")
    elif type(state) not in (*_PLAIN, Tensor, nn.Parameter, nn.Buffer):
        raise CheckpointError(
            f"{where} is {describe(state)}; a state holds tensors, numbers, strings, lists, "
            "tuples and dicts, so that it can be read back without running code; save "
            f"{_remedy(state)}"
        )


def _remedy(value: object) -> str:
    if hasattr(value, "state_dict"):
        return "its state_dict()"
    if type(value).__module__ == "numpy":
        return "torch.as_tensor() or .item() of it"
    return "plain data from which it can be made again"


def _check_keys(what: str, found: dict[str, Any], expected: set[str]) -> None:
    if set(found) != expected:
        missing, unknown = sorted(expected - set(found)), sorted(set(found) - expected)
        raise CheckpointError(
            f"{what} lacks the keys {missing} and has unknown keys {unknown}; use the version "
            "that wrote it"
        )


def capture_random(*, devices: bool = True) -> dict[str, Any]:
    """Return the state of the host's random generators and, if asked, of each CUDA device."""
    kind, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if devices and torch.cuda.is_available() else [],
        "numpy": [
            str(kind),
            torch.from_numpy(numpy.asarray(keys).astype(numpy.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "python": [version, torch.tensor(internal, dtype=torch.int64), gauss],
    }


def restore_random(state: dict[str, Any]) -> None:
    """Restore what `capture_random` returned; CUDA generators if there are as many devices."""
    _check_keys("the random state", state, {"torch", "cuda", "numpy", "python"})
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([generator.cpu() for generator in state["cuda"]])
    kind, keys, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state(
        (kind, keys.cpu().numpy().astype(numpy.uint32), position, has_gauss, cached)
    )
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal.tolist()), gauss))


class FrozenBase:
    """What of a model is as the task built it.

    At each save this reads every frozen tensor once, on its device: torch does not count all
    writes. It reads nothing in a step.
    """

    def __init__(self, model: nn.Module, files: Mapping[str, str]) -> None:
        self._model = model
        self._files = dict(files)
        self._built = {name: tensor_signature(value) for name, value in _frozen(model).items()}
        self._digests: dict[str, str] = {}

    def split(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the entries of a state dict to be saved, and the record of the others."""
        now = _frozen(self._model)
        same = {
            name: value
            for name, value in now.items()
            if name in state and self._built.get(name) == tensor_signature(value)
        }
        for name in same.keys() - self._digests.keys():
            self._digests[name] = tensor_digest(same[name])
        kept = {name: value for name, value in state.items() if name not in same}
        return kept, {
            "tensors": {name: self._digests[name] for name in same},
            "files": self._files,
        }


def completed(
    model: nn.Module, state: Mapping[str, Any], base: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a saved state dict with the entries that it left out, as the task has built them."""
    if base is None:
        return dict(state)
    found = {k: v for k, v in model.state_dict().items() if k in base["tensors"]}
    different = [
        name
        for name, digest in base["tensors"].items()
        if not isinstance(found.get(name), Tensor) or tensor_digest(found[name]) != digest
    ]
    if different:
        files = ", ".join(f"{path} (sha256 {one[:12]}...)" for path, one in base["files"].items())
        raise CheckpointError(
            f"the checkpoint has only what was trained (checkpoint.parameters: trained), and the "
            f"task now builds another base than the one it was trained on: {listed(different)}; "
            + (f"its files were {files}; " if files else "")
            + "restore the weights from which build_model() took it; a base that is drawn at "
            "random is another one for each seed and needs checkpoint.parameters: all"
        )
    return {**found, **state}


def _frozen(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict that require no gradients."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not is_lazy(value) and not value.requires_grad
    }


class EpochStart:
    """Takes and restores the data as they were when the present epoch began."""

    def __init__(self, source: Source, data: Data | None = None) -> None:
        self._source = source
        self._built = None
        if data is not None and source.forks:
            self._built = ObjectState({"data.train": data.train, "data.collate": data.collate})
        self._begun: dict[str, Any] = {}
        self._since: ObjectState | None = None
        self._windows: Iterator[Iterable[Batch]] | None = None

    def take(self) -> None:
        """Take the data as they are, right before the loader processes start."""
        if self._built is not None:
            with signatures_once():
                self._begun = snapshot({"begun": self._built.state_dict()})["begun"]
                self._since = self._built.from_now(lost="a resumed run would lose it")

    def state_dict(self) -> dict[str, Any]:
        """Return what had changed when the epoch began, and since; empty if nothing has."""
        since = {} if self._since is None else self._since.state_dict()
        return {"begun": self._begun, "since": since} if self._begun or since else {}

    def forget(self) -> None:
        """Forget the data of an epoch that is over."""
        self._begun, self._since = {}, None

    def load_state_dict(self, state: dict[str, Any], progress: dict[str, Any]) -> None:
        """Start the loader processes of an epoch with the data as they were; restore the data.

        To be called with the data as they were built, before anything else of them is restored.
        """
        if self._built is None or progress["batch_size"] != self._source.plan.batch_size:
            return  # the run resumes with other options, and not exactly
        epoch = progress["epoch"]
        self._built.load_state_dict(state["begun"])
        self.take()
        self._source.resume(epoch, progress["epoch_samples"])
        windows = iter(self._source.windows(epoch, progress["window"]))
        self._windows = chain(list(islice(windows, 1)), windows)  # the processes start
        self._built.load_state_dict(state["since"])

    def windows(self, epoch: int, window: int) -> Iterator[Iterable[Batch]]:
        """Return the windows of the epoch from `window` on."""
        started, self._windows = self._windows, None
        return iter(self._source.windows(epoch, window)) if started is None else started
