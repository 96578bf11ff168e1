"""Sharded models: equal to one process, resumed bit for bit, saved in a shard of each rank."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import nn

from sweeps.engine.sweep_plan import RankSizes
from sweeps.engine.task_check import TaskFacts
from tests.rank_training import TIMEOUT, Groups, config, curve, newest_state, to_end
from tests.sharded_tasks import Deep
from trainable.build import open_trainer
from trainable.check.compare_states import state_differences
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.checkpoint import CheckpointStore
from trainable.config import TrainConfig, TrialConfig
from trainable.errors import ConfigError, RankLost, TaskError, TrainingError
from trainable.export import export_weights
from trainable.failures import failure_of
from trainable.loop import Trainer
from trainable.parallel import sharded_step
from trainable.parallel.rank_group import _FIRST_BYTES
from trainable.parallel.sharded_step import UsedParameters
from trainable.parallel.sharding import check_shardable, check_units, local_part
from trainable.processes.local_ranks import LocalRanks
from trainable.ranks import Ranks
from trainable.store.snapshot import snapshot
from trainable.watch.diagnostics import MEASURED

RANKS = 3
FSDP = {"sharding": "fsdp"}
GROUPED: dict[str, Any] = {
    "ema": {"decay": 0.5},
    "schedule": {"name": "plateau", "patience": 0, "gamma": 0.5, "warmup": 0},
    "optimizer": {"name": "adamw", "lr": 0.1},
    "patience": 2,
    "epochs": 6,
}


def _config(
    workers: int = RANKS, name: str = "Deep", task: dict[str, Any] | None = None, **train: Any
) -> TrialConfig:
    options = {"epochs": 2, "every": "3 steps", **(FSDP if workers > 1 else {}), **train}
    return config(workers, {"name": f"tests.sharded_tasks:{name}", **(task or {})}, **options)


class _Runs(NamedTuple):
    """The directories of runs that have ended, errors of those that failed, states and times."""

    root: Path
    failed: dict[str, TrainingError]
    seen: dict[int, dict[str, Any]]
    seconds: dict[str, float]
    held: tuple[int, int]
    """Bytes of weights and of moments on the first rank."""


class _Observer:
    """Keeps the state of the last step."""

    def __init__(self) -> None:
        self.states: dict[int, dict[str, Any]] = {}

    def wants(self, step: int) -> bool:
        return step == 8

    def __call__(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        self.states[step] = snapshot(state())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> _Runs:
    """One group of processes trains all runs, one after the other."""
    root = tmp_path_factory.mktemp("sharded")
    dropout = {"dropout": 0.2}
    plan = {
        "plain": _config(),
        "through": _config(task=dropout, ema={"decay": 0.9}),
        "stopped": _config(task=dropout, ema={"decay": 0.9}),
        "resumed": _config(task=dropout, ema={"decay": 0.9}),
        "half": _config(),
        "two": _config(2),
        "grouped": _config(name="Grouped", **GROUPED),
        "own": _config(name="Counted", epochs=1, activation_checkpointing=True),
        "failing": _config(task={"fails": "1 value 5"}),
        "full": _config(task={"fails": "1 full 5"}),
        "killed": _config(task={"fails": "2 killed 5"}),
    }
    failed, seen, seconds, held = {}, _Observer(), {}, (0, 0)
    with LocalRanks(RANKS) as children:
        places = {"resumed": "stopped", "two": "half"}
        groups = Groups(children, [(c, root / places.get(n, n)) for n, c in plan.items()])
        groups.begin(accept_workers=[list(plan).index("two")])
        for number, name in enumerate(plan):
            options: dict[str, Any] = {}
            if name in ("stopped", "half"):  # after its fifth step, of eight
                calls = iter(range(100))
                options["should_stop"] = lambda calls=calls: next(calls) == 4
            begun = time.monotonic()
            try:
                with groups.first(number, **options) as trainer:
                    if name == "plain":
                        trainer.store.observer = seen
                    to_end(trainer)
                    held = _held(trainer) if name == "plain" else held
            except TrainingError as error:
                failed[name] = error
            seconds[name] = time.monotonic() - begun
    alone = {"one": _config(1), "grouped alone": _config(1, "Grouped", **GROUPED)}
    for name, given in alone.items():
        one = open_trainer(given, root / name, device="cpu")
        assert isinstance(one, Trainer)
        with one:
            to_end(one)
    return _Runs(root, failed, seen.states, seconds, held)


def _held(trainer: Trainer) -> tuple[int, int]:
    """Return the bytes of weights and moments on this rank."""
    optimizer = trainer._step.optimizer
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    moments = [v for p in weights for v in optimizer.state[p].values() if v.ndim]
    return _bytes(weights), _bytes(moments)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors)


@pytest.mark.integration
def test_announced_sizes_are_those_of_the_first_rank(runs: _Runs) -> None:
    found = asdict(inspect_task(CheckRequest(config=_config())))
    told = TaskFacts(**{key: found[key] for key in found if key.endswith("_bytes")})
    sizes = RankSizes.of(_config(), told)
    assert sizes is not None
    weights, moments = runs.held
    assert sizes.shard_bytes == weights > -(-sizes.weight_bytes // RANKS)
    without = 2 * 2 * 8  # two rows of `unused`, which has no gradient and so no moments
    assert sizes.part_bytes == 2 * weights + moments + without


@pytest.mark.integration
def test_sharded_training_equals_one_process(runs: _Runs) -> None:
    for name, alone in (("plain", "one"), ("half", "one"), ("grouped", "grouped alone")):
        directory = runs.root / name
        rows, expected = curve(directory), curve(runs.root / alone)
        assert [row.step for row in rows] == [row.step for row in expected]
        for row, other in zip(rows, expected, strict=True):
            assert row.metrics == pytest.approx(other.metrics, abs=1e-7)  # accuracy is fp32
            for key in ("train/loss", "train/grad_norm"):
                assert row.metrics[key] == pytest.approx(other.metrics[key], abs=1e-12)
        model, whole = newest_state(directory)["model"], newest_state(runs.root / alone)["model"]
        for key, value in whole.items():
            torch.testing.assert_close(model[key], value, rtol=0, atol=1e-12)


@pytest.mark.integration
def test_patience_and_plateau_end_sharded_ranks(runs: _Runs) -> None:
    rows = curve(runs.root / "grouped")
    assert len(rows) == 20
    assert {row.metrics["train/lr"] for row in rows} == {0.1, 0.05}
    assert rows[-1].metrics["num_averaged_weights"] == len(rows)


@pytest.mark.integration
def test_resumed_sharded_run_is_bit_exact(runs: _Runs) -> None:
    assert curve(runs.root / "stopped") == curve(runs.root / "through")
    states = (newest_state(runs.root / name) for name in ("stopped", "through"))
    assert list(state_differences(*states, ignored=MEASURED)) == []


@pytest.mark.integration
def test_observed_state_is_the_one_on_disk(runs: _Runs) -> None:
    assert list(state_differences(runs.seen[8], newest_state(runs.root / "plain"))) == []


@pytest.mark.integration
def test_each_rank_writes_its_shard(runs: _Runs) -> None:
    newest = CheckpointStore(runs.root / "plain").newest()
    assert newest is not None
    assert sorted(path.name for path in newest.path.iterdir()) == sorted(newest.files)
    assert len(newest.shards) == RANKS
    state = newest_state(runs.root / "plain")
    assert state["model"]["last.weight"].shape == (2, 5)  # the third rank's part is empty


@pytest.mark.integration
def test_export_of_shards_has_the_whole_model(runs: _Runs, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    newest = CheckpointStore(runs.root / "plain").newest()
    assert newest is not None
    export_weights(newest.address, tmp_path / "model.safetensors")
    exported = dict(load_file(tmp_path / "model.safetensors"))
    model = dict(newest_state(runs.root / "plain")["model"])
    assert model.pop("twin.weight") is model["first.weight"]  # tied: written once
    assert list(state_differences(exported, model)) == []


@pytest.mark.integration
def test_own_evaluation_runs_on_a_sharded_model(runs: _Runs) -> None:
    row = curve(runs.root / "own")[-1]
    assert row.metrics["val/own"] == 1.0
    assert runs.failed.keys() == {"failing", "full", "killed"}


@pytest.mark.integration
def test_error_within_a_pass_names_the_rank(runs: _Runs) -> None:
    assert "rank 1: ValueError: bad sample 17" in str(runs.failed["failing"])


@pytest.mark.integration
def test_full_disk_of_a_rank_is_that_of_the_trial(runs: _Runs) -> None:
    failure = failure_of(runs.failed["full"])
    assert (failure["kind"], failure["errno"]) == ("storage", errno.ENOSPC)
    assert failure["host"] == socket.gethostname()
    for part in ("the checkpoint of step", "(rank 1)", "earlier checkpoints are untouched"):
        assert part in failure["reason"]


@pytest.mark.integration
def test_rank_killed_within_a_pass_is_lost(runs: _Runs) -> None:
    assert isinstance(runs.failed["killed"], RankLost)
    assert runs.seconds["killed"] < TIMEOUT / 2  # the others have heard of it at once


def _refusal(model: nn.Module, **changes: Any) -> str:
    given = _config(**changes.pop("config", {}))
    task = changes.pop("task", Deep())
    with pytest.raises((ConfigError, TaskError)) as found:
        check_shardable(given, task, model, given.train.precision)
    return str(found.value)


def _with(name: str, module: nn.Module) -> nn.Module:
    model = Deep().build_model()
    model.add_module(name, module)
    return model


class _OwnOptimizer(Deep):
    def build_optimizer(self, model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config.optimizer.lr)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"workers": 1, "sharding": "fsdp"}, "workers: 2"),
        ({"optimizer": {"name": "adafactor", "lr": 0.1}}, "adafactor"),
        ({"precision": "fp16"}, "fp16"),
        ({"compile": True}, "train.compile: true"),
        ({"batch_size": 2, "accumulation": 1}, "3 workers"),
    ],
)
def test_configuration_that_excludes_sharding(config: dict[str, Any], named: str) -> None:
    assert named in _refusal(Deep().build_model(), config=config)


@pytest.mark.parametrize(
    ("module", "named"),
    [
        (nn.Embedding(5, 3, sparse=True), "sparse gradients"),
        (nn.LazyLinear(3), "lazy"),
        (_Scale(), "no dimension"),
    ],
)
def test_model_that_cannot_be_cut(module: nn.Module, named: str) -> None:
    found = _refusal(_with("more", module))
    assert named in found
    assert "train.sharding: none" in found


def test_own_optimizer_is_refused_for_shards() -> None:
    assert "build_optimizer()" in _refusal(Deep().build_model(), task=_OwnOptimizer())


def test_weights_tied_across_blocks_are_refused() -> None:
    model: Any = Deep().build_model()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    with pytest.raises(TaskError, match=r"blocks\.1\.linear\.weight is tied"):
        check_units([*model.blocks, model], model)
    model = Deep().build_model()
    model.last.weight = nn.Parameter(torch.ones(2, 5))  # float32 in a model of float64
    with pytest.raises(TaskError, match="float32 and float64"):
        check_units([*model.blocks, model], model)


class _Other(Ranks):
    """Another rank, which has used the first parameter; keeps the bytes of each message."""

    size = 2

    def __init__(self) -> None:
        self.sent: list[int] = []

    def gather_plain(
        self, value: Any, error: BaseException | None = None, *, seconds: float | None = None
    ) -> list[Any]:
        del error, seconds
        self.sent.append(len(json.dumps([None, value])))
        return [value, "1" + value[1:]]


@pytest.mark.parametrize("number", [3, 4_000])
def test_which_parameters_were_used_is_one_operation(number: int) -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(number)]
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    places = [(None, "", parameter) for parameter in parameters]
    with (
        patch.object(sharded_step, "sharded_parameters", lambda _: places),
        patch.object(sharded_step, "sharded_units", lambda _: []),
    ):
        used = UsedParameters(nn.Module())
    used._mark(2, parameters[2])
    ranks = _Other()
    used.take(ranks)
    assert [n for n, p in enumerate(parameters) if p.grad is not None] == [0, 2]
    assert len(ranks.sent) == 1
    assert ranks.sent[0] <= _FIRST_BYTES - 8, "a longer message takes a second operation"
