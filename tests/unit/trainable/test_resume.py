"""A run stopped anywhere ends bit for bit like an uninterrupted one."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import subprocess
import sys

import numpy
import pytest
import torch

from tests.optimizers import TwoOptimizers
from tests.resumption import Crash, crash_at, curve, equal, to_end
from tests.slices import sliced
from trainable import checkpoint
from trainable.build import open_trainer
from trainable.check.findings import CheckRequest
from trainable.check.inspect_task import inspect_task
from trainable.config import OPTIMIZER_DEFAULTS, TrialConfig
from trainable.errors import CheckpointError
from trainable.store.local import LocalFiles
from trainable.store.metrics_file import History, read_resumptions

WARMUP = {"name": "cosine", "warmup": 6}
_BY_NAME = ("sgd", "adam", "adamw", "adafactor", "lamb", "lion", "muon")
_OF_TORCH = sliced(
    ({"optimizer": {"name": name}} for name in OPTIMIZER_DEFAULTS if name not in _BY_NAME),
    lambda options: options["optimizer"]["name"] in ("asgd", "rprop"),
)


@pytest.mark.seeds("S15")
@pytest.mark.parametrize("every", ["1 epoch", "2 steps"])
def test_crash_and_resume_equals_an_uninterrupted_run(resumes_exactly, configure, toy, every):
    config = configure(every=every, schedule=WARMUP, clip={"max_norm": 0.3}, layer_norms_every=3)
    resumes_exactly(config, toy, 1, 2, 3, 6, 7, 9, 11)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp16"},
        {"precision": "bf16"},
        {"accumulation": 4},
        {"optimizer": {"name": "sgd", "momentum": 0.9, "nesterov": True}},
        {"optimizer": {"name": "adafactor"}},
        {"schedule": {"name": "plateau", "patience": 0, "warmup": 2}},
        {"schedule": {"name": "onecycle", "warmup": 0.3}},
        *_OF_TORCH,
        {"optimizer": {"name": "tests.optimizers:ScheduleFree", "lr": 0.3}},
        {"optimizer": {"name": "adam", "arguments": {"amsgrad": True}}},
        {"schedule": {"name": "wsd", "decay": 4, "warmup": 2}},
        {"schedule": {"name": "cosine_restarts", "cycles": 2}},
        {"schedule": {"name": "tests.optimizers:two_levels", "arguments": {"low": 0.2}}},
        {"loader": {"drop_last": True}},
        {"ema": {"decay": 0.8, "start": 3}},
        {"ema": {"decay": 0.8, "start": 0.5}, "precision": "fp16"},
        {"swa": {"start": 2, "every": "3 steps"}},
        {"budget": {"steps": 13, "report_every": 3}},
        {"budget": {"steps": 13, "report_every": 5, "val_batches": 2}, "precision": "fp16"},
        {"budget": {"samples": 140, "report_every": 30}, "accumulation": 3},
        {"budget": {"epochs": 3, "report_every": 0.4}, "schedule": {"name": "plateau"}},
        {"budget": {"epochs": 3, "report_every": 2}},
    ],
    ids=str,
)
def test_every_kind_of_run_resumes_exactly(resumes_exactly, configure, toy, options):
    _, resumed = resumes_exactly(configure(**{"every": "2 steps", **options}), toy, 7)
    assert 0 < resumed.resumed_at < resumed.position


class Grouped:
    """Mixed into the toy task: its first layer is frozen, its last bias learns at a tenth."""

    def build_model(self):
        model = super().build_model()
        model[0].requires_grad_(False)
        return model

    def param_groups(self, model):
        return [
            {"params": [model[3].weight]},
            {"params": [model[3].bias], "lr_multiplier": 0.1, "weight_decay": 0.0},
            {"params": list(model[0].parameters())},
        ]


def test_run_with_groups_of_its_own_resumes_exactly(
    tmp_path, resumes_exactly, opened, configure, toy
):
    task = type("GroupedToy", (Grouped, toy), {})
    config = configure(every="2 steps", schedule=WARMUP)
    start = opened(config, tmp_path / "start", task()).model
    whole, resumed = resumes_exactly(config, task, 3, 5, 10)
    assert resumed.resumed_at > 0
    fast, slow, _ = (group["initial_lr"] for group in resumed.groups)
    assert slow == pytest.approx(0.1 * fast)
    changed = [
        not torch.equal(*pair)
        for pair in zip(start.parameters(), whole.model.parameters(), strict=True)
    ]
    assert changed == [False, False, True, True]


class Weighing:
    """Mixed into the toy task: how much the loss counts is trained, too, outside the model."""

    def __init__(self):
        super().__init__()
        self.balance = torch.nn.Parameter(torch.zeros(()))

    def param_groups(self, model):
        return [*super().param_groups(model), {"params": [self.balance]}]

    def loss(self, model, batch):
        part, weight = super().loss(model, batch)
        return part * torch.exp(-self.balance) + weight * self.balance, weight


@pytest.mark.parametrize("mixed", [TwoOptimizers, Weighing])
def test_what_a_task_trains_otherwise_resumes_exactly(resumes_exactly, configure, toy, mixed):
    """Two optimizers; a parameter outside the model."""
    config = configure(every="2 steps", schedule=WARMUP)
    whole, resumed = resumes_exactly(config, type("Mixed", (mixed, toy), {}), 3, 7)
    assert 0 < resumed.resumed_at < whole.position
    if mixed is Weighing:
        assert whole.task.balance.item() == resumed.task.balance.item() != 0


def test_missing_state_of_outside_parameters_is_refused(tmp_path, opened, configure, toy):
    to_end(opened(configure(), tmp_path, toy(), until=1))
    with pytest.raises(CheckpointError, match="lacks the keys \\['outside'\\]"):
        opened(configure(), tmp_path, type("WeighingToy", (Weighing, toy), {})())


def test_outside_parameters_keep_their_shape(tmp_path, opened, configure, toy):
    kind = type("WeighingToy", (Weighing, toy), {})
    to_end(opened(configure(optimizer={"name": "sgd"}), tmp_path, kind(), until=1))
    other = kind()
    other.balance = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"does not fit[\s\S]*size mismatch"):
        opened(configure(optimizer={"name": "sgd"}), tmp_path, other)


class Sequences:
    """Mixed into the toy task: its first layer is a recurrent one."""

    def build_model(self):
        return torch.nn.Sequential(First(5, 8), torch.nn.Linear(8, 3))


class First(torch.nn.GRU):
    def forward(self, inputs):
        return super().forward(inputs)[0]


class Decaying:
    """Mixed in besides: groups as they were when the biases of such a layer decayed."""

    def param_groups(self, model):
        *decayed, bias = model.parameters()
        return [{"params": decayed}, {"params": [bias], "weight_decay": 0.0}]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_groups_with_other_parameters_are_refused(tmp_path, opened, configure, toy, optimizer):
    before, now = type("Before", (Decaying, Sequences, toy), {}), type("Now", (Sequences, toy), {})
    config = configure(optimizer={"name": optimizer})
    to_end(opened(config, tmp_path, before(), until=1))
    with pytest.raises(
        CheckpointError,
        match=r"does not fit .* \(its parameter groups hold \[5, 1\] parameters, those of the "
        r"task \[3, 3\]\); continue with the code, the version and the configuration that wrote "
        "it, or start a new run$",
    ):
        opened(config, tmp_path, now())
    assert opened(config, tmp_path, before()).resumed_at == 4


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_moments_of_another_shape_are_refused(tmp_path, opened, configure, toy, optimizer):
    """Fused kernels would read beyond the end of the smaller ones."""

    def task(*order):
        groups = lambda self, model: [{"params": [model[at].weight]} for at in order]  # noqa: ARG005, E731
        return type("Ordered", (toy,), {"param_groups": groups})()

    config = configure(optimizer={"name": optimizer})
    to_end(opened(config, tmp_path, task(0, 3), until=1))
    with pytest.raises(
        CheckpointError,
        match=r"does not fit .* belongs to a parameter of shape \[8, 5\], but the task's "
        r"parameter has shape \[3, 8\]\); ",
    ):
        opened(config, tmp_path, task(3, 0))


def _run_drawing(toy, opened, config, directory, *, crash_after=None):
    """Train a task that draws from every generator of the host; return them after each step."""

    class Drawing(toy):  # its dropout draws from torch's
        def loss(self, model, batch):
            loss, weight = super().loss(model, batch)
            return loss * (1 + 0.1 * numpy.random.rand() + 0.1 * random.random()), weight

    generators = {}

    def after_each_step():
        step = trainer.state.progress.step
        generators[step] = trainer.state.state_dict()["random"]
        if step == crash_after:
            raise Crash
        return False

    trainer = opened(config, directory, Drawing(), should_stop=after_each_step)
    try:
        to_end(trainer)
    except Crash:
        assert crash_after is not None
    return generators


@pytest.mark.seeds("S15")
def test_generators_are_equal_after_each_resumed_step(tmp_path, opened, configure, toy):
    config = configure(every="2 steps")
    whole = _run_drawing(toy, opened, config, tmp_path / "whole")
    _run_drawing(toy, opened, config, tmp_path / "cut", crash_after=4)
    torch.manual_seed(99)
    numpy.random.seed(99)
    random.seed(99)
    rest = _run_drawing(toy, opened, config, tmp_path / "cut")
    # Otherwise equality would say nothing: each generator moves with each step.
    for name in ("torch", "numpy", "python"):
        for one, other in itertools.pairwise(whole.values()):
            assert not equal(one[name], other[name]), name
    assert list(rest) == list(range(min(rest), 13))
    assert 2 < min(rest) <= 5
    for step, found in rest.items():
        for name in ("torch", "numpy", "python"):
            assert equal(whole[step][name], found[name]), (step, name)


class _Stateless:
    """What a test keeps beside a task: it says itself that none of it is saved."""

    def __reduce__(self):
        return _Stateless, ()


def _overflowing(toy, is_there):
    """A task whose gradients overflow where `is_there` says so of its progress."""
    here = _Stateless()

    class Overflowing(toy):
        def loss(self, model, batch):
            part, weight = super().loss(model, batch)
            if model.training and is_there(here.trainer.state.progress):
                part.register_hook(lambda gradient: gradient * torch.inf)
            return part, weight

    return here, Overflowing


def test_fp16_skipped_last_window_survives_an_interruption(tmp_path, opened, configure, toy):
    """The last row's metrics are in the file then, and nothing follows it but the boundary's."""
    here, kind = _overflowing(toy, lambda at: (at.epoch, at.window) == (1, 3))
    config = configure(every="1 step", metric="train/loss", precision="fp16")
    whole = here.trainer = opened(config, tmp_path / "whole", kind())
    reports = to_end(here.trainer)
    assert [(report.epoch, report.step) for report in reports] == [(1, 4), (2, 7), (3, 11)]
    assert reports[1].metrics["train/loss"] == reports[1].rows[-2].metrics["train/loss"]

    def before_it():
        return here.trainer.state.progress.step == 7

    here.trainer = opened(config, tmp_path / "cut", kind(), should_stop=before_it)
    assert len(to_end(here.trainer)) == 1
    here.trainer = opened(config, tmp_path / "cut", kind())
    assert [report.epoch for report in to_end(here.trainer)] == [2, 3]
    assert equal(whole.state.state_dict(), here.trainer.state.state_dict())
    assert curve(tmp_path / "whole") == curve(tmp_path / "cut")


def test_fp16_skipped_first_epoch_stays_in_the_curve(tmp_path, opened, configure, toy):
    here, kind = _overflowing(toy, lambda at: at.epoch == 0)
    config = configure(precision="fp16")
    here.trainer = opened(config, tmp_path / "whole", kind())
    reports = to_end(here.trainer)
    assert [(report.epoch, report.step) for report in reports] == [(1, 0), (2, 4), (3, 8)]
    for until in (1, None):
        here.trainer = opened(config, tmp_path / "cut", kind(), until=until)
        to_end(here.trainer)
    rows = curve(tmp_path / "whole")
    assert [step for step, _ in rows] == list(range(9))
    assert rows == curve(tmp_path / "cut")


def test_checkpoints_of_another_user_are_not_resumed(
    tmp_path, opened, configure, toy, monkeypatch
):
    """They name classes, of which a resume makes objects."""
    config = configure(epochs=1)
    trainer = opened(config, tmp_path, toy())
    to_end(trainer)
    trainer.close()
    monkeypatch.setattr(checkpoint, "is_ours", lambda _: False)
    with pytest.raises(CheckpointError, match=r"belongs to user \d+, and resuming"):
        opened(config, tmp_path, toy())
    with pytest.raises(CheckpointError, match=r"belongs to user \d+, and resuming"):
        opened(config, tmp_path / "other", toy(), restore=trainer.store.pointer.address)


def test_interruptions_are_counted_where_the_run_resumed(tmp_path, opened, configure, toy):
    config = configure(every="2 steps")
    for crash in (3, 4):  # after step 3, and four steps after that
        with pytest.raises(Crash):
            to_end(opened(config, tmp_path, toy(), should_stop=crash_at(crash)))
    last = opened(config, tmp_path, toy())
    marks = read_resumptions(tmp_path)
    assert marks == sorted({2, last.resumed_at})
    to_end(last)
    to_end(opened(config, tmp_path, toy()))  # it had ended: nothing was interrupted
    assert read_resumptions(tmp_path) == marks


def _constant(self, model, batches):  # noqa: ARG001  an evaluation's signature
    return {"loss": 1.0}


def test_rows_beyond_the_checkpoint_are_cut_back(tmp_path, opened, configure, toy):
    """Epochs 1 (a best) and 3 save; the crash after epoch 2 leaves rows that no state covers."""
    task = type("Constant", (toy,), {"evaluate": _constant})
    config = configure(every="3 epochs")
    to_end(opened(config, tmp_path / "whole", task()))
    with pytest.raises(Crash):
        to_end(opened(config, tmp_path / "cut", task(), should_stop=crash_at(11)))
    assert curve(tmp_path / "cut")[-1][0] == 8
    resumed = opened(config, tmp_path / "cut", task())
    assert curve(tmp_path / "cut")[-1][0] == resumed.state.progress.step == 4
    to_end(resumed)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_rows_are_durable_before_their_checkpoint(tmp_path, opened, configure, toy, monkeypatch):
    order = []
    for owner, name in ((History, "sync"), (LocalFiles, "commit")):
        original = getattr(owner, name)

        def follow(*arguments, original=original, name=name):
            order.append(name)
            return original(*arguments)

        monkeypatch.setattr(owner, name, follow)
    to_end(opened(configure(epochs=1), tmp_path, toy()))
    assert order == ["sync", "commit"]


def test_augmentation_is_equal_for_any_workers_and_a_crash(resumes_exactly, configure, toy):
    config = configure(every="2 steps", loader={"num_workers": 2})
    alone = configure(every="2 steps")
    resumes_exactly(config, lambda: toy(augmented=True), 6, undisturbed=alone)
    assert not multiprocessing.active_children()


def test_augmentation_does_not_depend_on_micro_batches(tmp_path, opened, configure, toy):
    losses = []
    for accumulation in (1, 3):
        task = toy(augmented=True)
        task.dropout = 0.0
        config = configure(accumulation=accumulation)
        trainer = opened(config, tmp_path / str(accumulation), task)
        losses.append([r.metrics["train/loss"] for e in to_end(trainer) for r in e.rows])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_interrupted_run_saves_and_resumes(tmp_path, opened, configure, toy):
    config = configure()
    whole = opened(config, tmp_path / "whole", toy())
    expected = to_end(whole)
    steps = itertools.count(1)
    stopped = opened(config, tmp_path / "cut", toy(), should_stop=lambda: next(steps) >= 6)
    first = to_end(stopped)
    assert [report.epoch for report in first] == [1]
    resumed = opened(config, tmp_path / "cut", toy())
    assert resumed.state.progress.step == 6
    second = to_end(resumed)
    # Rows logged before the interruption are reported with the epoch that they belong to.
    assert [[row.step for row in r.rows] for r in first + second] == [
        [row.step for row in r.rows] for r in expected
    ]
    assert equal(whole.state.state_dict(), resumed.state.state_dict())


def test_finished_run_repeats_its_last_report(tmp_path, opened, configure, toy):
    config = configure()
    last = to_end(opened(config, tmp_path, toy()))[-1]
    (again,) = to_end(opened(config, tmp_path, toy()))
    assert again.finished
    assert (again.step, again.epoch, again.metrics) == (last.step, last.epoch, last.metrics)
    assert again.rows == []
    assert again.checkpoint == last.checkpoint


def test_run_starts_from_another_runs_checkpoint(tmp_path, opened, configure, toy):
    config = configure(epochs=2)
    donor = opened(config, tmp_path / "donor", toy())
    to_end(donor)
    first, _ = donor.store.generations()
    copied = opened(config, tmp_path / "heir", toy(), restore=first.address)
    assert copied.state.progress.epoch == 1
    assert [r.epoch for r in to_end(copied)] == [2]


def test_warm_started_run_keeps_group_multipliers(tmp_path, opened, configure, toy):
    def task(multiplier):
        group = {"lr_multiplier": multiplier}
        groups = lambda self, model: [{"params": model.parameters(), **group}]  # noqa: ARG005, E731
        return type("Scaled", (toy,), {"param_groups": groups})()

    config = configure(schedule={"name": "constant"}, optimizer={"lr": 0.01})
    donor = opened(config, tmp_path / "donor", task(10.0), until=1)
    to_end(donor)
    heir = opened(config, tmp_path / "heir", task(1.0), restore=donor.store.newest().address)
    to_end(heir)
    assert [group["lr"] for group in heir.groups] == [0.01]
    assert {metrics["train/lr"] for _, metrics in curve(tmp_path / "heir")} == {0.01}


@pytest.mark.parametrize(("size", "again"), [(12, 0), (6, 0), (4, 0), (8, 0), (9, 6), (30, 24)])
def test_batch_size_change_in_mid_epoch_loses_no_sample(
    tmp_path, opened, configure, toy, size, again
):
    """What is more than a whole new window comes twice instead."""
    seen = []

    class Seen(toy):
        def loss(self, model, batch):
            if model.training:
                seen.extend(batch[0][:, 0].tolist())
            return super().loss(model, batch)

    asked = iter([False, True])
    first = opened(
        configure(epochs=1), tmp_path, Seen(samples=60), should_stop=lambda: next(asked)
    )
    to_end(first)
    assert len(seen) == 24
    to_end(opened(configure(epochs=1, batch_size=size), tmp_path, Seen(samples=60)))
    assert (len(set(seen)), len(seen)) == (60, 60 + again)


COUNTING = """
import numpy
import torch
from torch import nn
from trainable.task import Data, Task


class Counting(nn.Linear):
    def get_extra_state(self):
        return {"seen": numpy.int64(3)}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Counted(Task):
    def build_model(self):
        return nn.Sequential(Counting(5, 3))

    def build_data(self):
        samples = torch.ones(24, 5), torch.zeros(24, dtype=torch.long)
        return Data(train=samples, val=samples)
"""


def test_unreadable_state_is_refused_before_training(tmp_path, opened, configure, monkeypatch):
    """And by whoever saves it, for it may turn so later."""
    (tmp_path / "counting_task.py").write_text(COUNTING)
    monkeypatch.syspath_prepend(tmp_path)
    task = {"name": "counting_task:Counted"}
    config = TrialConfig.model_validate(configure(every="2 steps").model_dump() | {"task": task})
    wanted = (
        r"the model's state\['0._extra_state'\]\['seen'\] is an object of type numpy.int64; .*"
        r"save torch.as_tensor\(\) or .item\(\) of it"
    )
    trainer = opened(config, tmp_path / "run", None)
    with pytest.raises(CheckpointError, match=wanted):
        to_end(trainer)
    assert trainer.state.progress.step == 2
    with pytest.raises(CheckpointError, match=wanted):
        inspect_task(CheckRequest(config=config))


def test_eager_momentum_is_kept_if_a_state_has_none(tmp_path, opened, configure, toy):
    """Else a first step that fp16 skips would leave whatever the memory held."""
    donor = opened(configure(optimizer={"name": "sgd", "momentum": 0.0}), tmp_path, toy(), until=1)
    to_end(donor)
    config = configure(optimizer={"name": "sgd", "momentum": 0.9})
    heir = opened(config, tmp_path / "heir", toy(), restore=donor.store.newest().address)
    (group,) = [group for group in heir.groups if group["weight_decay"] == 0][:1]
    moments = heir._step.optimizer.state
    assert all((moments[p]["momentum_buffer"] == 0).all() for p in group["params"])


CRASHING = """
import os, sys
from pathlib import Path
from trainable import TrialConfig, open_trainer

config = TrialConfig.model_validate_json(sys.argv[1])
step = iter(range(1, 1000))
with open_trainer(config, Path(sys.argv[2]), device="cpu", threads=1,
                  should_stop=lambda: next(step) == 52 and os._exit(1)) as trainer:
    for report in trainer.events():
        pass
"""


@pytest.mark.seeds("S17")
def test_crash_in_the_third_epoch_leaves_one_continuous_curve(tmp_path):
    config = TrialConfig.model_validate(
        {
            "task": {"name": "digits", "model": "mlp", "width": 8, "dropout": 0.1},
            "metric": "val/accuracy",
            "mode": "max",
            "budget": {"epochs": 4},
            "checkpoint": {"every": "10 steps"},
            "train": {"schedule": {"name": "onecycle", "warmup": 0.3}},
        }
    )
    command = [sys.executable, "-c", CRASHING, config.model_dump_json(), str(tmp_path / "cut")]
    assert subprocess.run(command, check=False).returncode == 1
    with open_trainer(config, tmp_path / "cut", device="cpu") as resumed:
        # What was being written when the process died is there or not; what came before is.
        assert resumed.state.progress.step in (40, 46, 50)
        to_end(resumed)
    with open_trainer(config, tmp_path / "whole", device="cpu") as whole:
        to_end(whole)
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")
    assert [step for step, _ in curve(tmp_path / "cut")] == list(range(1, 93))
