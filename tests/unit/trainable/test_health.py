"""Health signals on synthetic histories: each fires exactly when it should."""

from __future__ import annotations

import math
import random
import time
from types import SimpleNamespace

import pytest
import torch

from tests.saved_objects import Seen
from trainable.store.metrics_file import Row
from trainable.task import Data
from trainable.watch import health
from trainable.watch.health import HealthMonitor

pytestmark = pytest.mark.seeds("S22")


def _noisy(values, scale, seed=0):
    generator = random.Random(seed)
    return [value * (1 + generator.gauss(0, scale)) for value in values]


def _falling(steps, start=2.3, end=0.3, rate=60):
    return [end + (start - end) * math.exp(-step / rate) for step in range(steps)]


FALLING = _noisy(_falling(300), 0.05)

HEALTHY = {
    "noisy falling loss": (health.loss_spike, _noisy(_falling(300), 0.3)),
    "one bad batch": (health.loss_spike, [*FALLING, 9.0, *FALLING[-3:]]),
    "noise of a converged loss": (
        lambda losses: health.loss_spike(losses, 0.7),
        [1e-5] * 50 + [2.5e-4] * 5,
    ),
    "rising a little": (health.loss_spike, [1.0] * 50 + [1.2] * 5),
    "slowly falling loss": (
        health.loss_plateau,
        _noisy([2.0 - 0.002 * step for step in range(200)], 0.05),
    ),
    "two spikes": (health.norm_spikes, [1.0] * 18 + [500.0] * 2),
    "spikes long ago": (health.norm_spikes, [500.0] * 50 + [1.0] * 20),
    "one dead step": (health.norm_collapse, [1.0] * 40 + [0.0] * 19 + [0.1]),
    "one slow epoch of the loader": (health.device_under_used, [95.0, 95.0, 20.0]),
    "warming up": (health.memory_growing, [100.0, 300.0, 450.0] + [500.0] * 30),
    "saw tooth": (health.memory_growing, [500.0 + 30 * (i % 10) for i in range(40)]),
    "one slow epoch": (health.throughput_dropping, [1000.0] * 10 + [100.0]),
    "finite": (health.loss_not_finite, [1.0, 2.0]),
}

SICK = {
    "NaN": (health.loss_not_finite, [1.0, math.nan], "loss is nan"),
    "jump": (
        health.loss_spike,
        [0.5] * 60 + [4.0] * 5,
        "loss jumped from 0.5 to 4 within 5 steps: lower the learning rate or max_norm",
    ),
    "plateau": (
        health.loss_plateau,
        _noisy([2.3] * 200, 0.02),
        "loss has stayed near 2.3 for 200 steps",
    ),
    "spikes": (
        health.norm_spikes,
        [1.0] * 13 + [250.0] * 7,
        "gradient norm above 100 in 7 of the last 20 steps: lower the learning rate or max_norm",
    ),
    "collapse": (health.norm_collapse, [1.0] * 100 + [1e-9] * 20, "gradient norm below 1e-09"),
    "idle device": (
        health.device_under_used,
        [95.0, 30.0, 20.0, 30.0],
        "the device computed for 30 % of the training time: raise loader.num_workers",
    ),
    "leak": (
        health.memory_growing,
        [500.0 + 10 * i for i in range(40)],
        "memory grew from 600 to 890 MiB",
    ),
    "slower": (
        health.throughput_dropping,
        [1000.0] * 10 + [400.0] * 3,
        "throughput fell from 1,000 to 400 samples per second",
    ),
}


@pytest.mark.parametrize(("look", "history"), HEALTHY.values(), ids=HEALTHY)
def test_healthy_histories_have_no_signal(look, history):
    assert look(history) is None


@pytest.mark.parametrize(("look", "history", "sentence"), SICK.values(), ids=SICK)
def test_sick_histories_are_described_in_a_sentence(look, history, sentence):
    signal = look(history)
    assert signal.name == look.__name__
    assert sentence in signal.sentence
    assert "\n" not in signal.sentence


@pytest.mark.parametrize(
    ("busy", "memory", "share", "advice"),
    [
        ([22, 10, 22, 90], [20.0], 1.0, "resources: {gpu: 0.25} would train 4 trials"),
        ([22, 10, 22, 90], [], 1.0, "resources: {gpu: 0.25} would train 4 trials"),
        ([22, 22, 22], [40.0], 1.0, "resources: {gpu: 0.5} would train 2 trials"),
        ([30, 30, 30], [12.0], 0.5, "resources: {gpu: 0.16} would train 6 trials"),
        ([0, 0, 0], [13.0], 1.0, "resources: {gpu: 0.16} would train 6 trials"),
        ([22, 22, 22], [60.0], 1.0, "raise loader.num_workers or batch_size"),
        ([48, 48, 48], [1.0], 0.25, "resources: {gpu: 0.14} would train 7 trials"),
    ],
)
def test_under_used_gpu_has_the_share_that_packs(busy, memory, share, advice):
    signal = health.gpu_under_used(busy, memory, share)
    assert signal.name == "gpu_under_used"
    assert f"in the median: {advice}" in signal.sentence


@pytest.mark.parametrize("busy", [[], [10, 10], [10, 51, 51], [100] * 9])
def test_gpu_in_use_has_no_signal(busy):
    assert health.gpu_under_used(busy, [10.0]) is None


def test_process_that_exceeds_its_share_of_a_gpu_is_named():
    assert health.gpu_share_exceeded([90.0], 1.0) is None
    assert health.gpu_share_exceeded([], 0.25) is None
    assert health.gpu_share_exceeded([20.0, 25.0], 0.25) is None
    signal = health.gpu_share_exceeded([20.0, 31.4, 30.0], 0.25)
    for part in ("31 % of the GPU's memory", "its share is 25 %", "{gpu: 0.32}"):
        assert part in signal.sentence


def test_loss_whose_noise_hides_a_fall_is_no_plateau():
    """A fall from 0.29 to 0.25 with a standard error of 0.035: neither flat nor surely falling."""
    noisy = [level + side for level in (0.29, 0.25) for side in (0.25, -0.25) * 50]
    assert health.loss_plateau(noisy) is None
    assert health.loss_plateau([2 + one for one in noisy]) is not None  # 2 % of it at most


def test_converged_run_is_no_plateau():
    flat = _noisy([0.01] * 200, 0.1)
    assert health.loss_plateau(flat, start=2.3) is None
    assert health.loss_plateau(flat, start=0.011) is not None


@pytest.mark.parametrize(
    ("train", "val", "alarm"),
    [
        ([1.0, 0.8, 0.6, 0.4], [0.9, 0.95, 1.0, 1.1], True),
        ([1.0, 0.8, 0.6, 0.4], [0.9, 0.95, 0.94, 1.1], False),  # one better epoch
        ([1.0, 1.1, 1.2, 1.3], [0.9, 0.95, 1.0, 1.1], False),  # both rise: not overfitting
        ([1.0, 0.8, 0.6, 0.4], [0.9, 0.901, 0.902, 0.903], False),  # too little to matter
    ],
)
def test_overfitting_is_rising_val_and_falling_train_loss(train, val, alarm):
    signal = health.overfitting(train, val)
    assert (signal is not None) == alarm
    if signal is not None:
        assert signal.sentence.startswith("val/loss rose from 0.9 to 1.1 over 3 epochs")


def test_constant_lr_is_a_warning_only_if_the_schedule_moves():
    falling = [0.1 - 0.001 * step for step in range(30)]
    assert health.lr_stuck(falling, [0.1] * 30).name == "lr_stuck"
    assert "the schedule asks for 0.071" in health.lr_stuck(falling, [0.1] * 30).sentence
    assert health.lr_stuck(falling, falling) is None
    ending = [1e-5 * (1 - 1e-5 * step) for step in range(30)]
    assert health.lr_stuck(ending, [1e-5] * 30) is None


def _row(step, **metrics):
    return Row(step, 0, {key.replace("__", "/"): value for key, value in metrics.items()})


def test_monitor_derives_signals_from_rows():
    monitor = HealthMonitor()
    for step in range(1, 31):
        row = _row(step, train__loss=1.0, train__grad_norm=400.0, train__lr=0.1)
        monitor.observe(row, 0.1 / step)
    monitor.observe(_row(31, val__loss=math.nan))
    assert [s.name for s in monitor.signals()] == ["loss_not_finite", "norm_spikes", "lr_stuck"]
    assert monitor.sentences()[0].startswith("val/loss is nan")


def test_monitor_after_resume_equals_uninterrupted():
    rows = [_row(step, train__loss=2.0, train__grad_norm=200.0) for step in range(1, 250)]
    whole, resumed = HealthMonitor(), HealthMonitor()
    for row in rows:
        whole.observe(row)
    resumed.load_history(rows[:100])
    for row in rows[100:]:
        resumed.observe(row)
    resumed.load_history([_row(step, memory__process_mb=100.0 * step) for step in range(1, 30)])
    assert whole.signals() == resumed.signals()
    assert [s.name for s in whole.signals()] == ["loss_plateau", "norm_spikes"]


def test_memory_leak_is_detected_within_three_epochs(tmp_path, opened, configure, toy):
    class Keeping(toy):
        kept = Seen()  # as the mistake is made: it outlives the step

        def loss(self, model, batch):
            if model.training:
                self.kept.append(torch.ones(25 * 2**18))  # 25 MiB of the process at each step
            return super().loss(model, batch)

    reports = list(opened(configure(epochs=4), tmp_path, Keeping()).events())
    rows = [report.metrics["memory/process_mb"] for report in reports]
    assert 270 < rows[-1] - rows[0] < 350  # twelve steps
    assert not any("memory" in sentence for sentence in reports[1].signals)
    assert any(
        sentence.startswith("memory/process_mb grew from ") for sentence in reports[-1].signals
    )


def test_slow_loader_is_a_signal(tmp_path, opened, configure, toy):
    class Slow(torch.utils.data.Dataset):
        def __init__(self, tensors):
            self.tensors = tensors

        def __len__(self):
            return len(self.tensors[0])

        def __getitem__(self, index):
            time.sleep(0.003)
            return self.tensors[0][index], self.tensors[1][index]

    class Waiting(toy):
        def build_data(self):
            data = super().build_data()
            return Data(train=Slow(data.train), val=data.val)

    config = configure(epochs=3, measure_device_time=True)
    last = list(opened(config, tmp_path, Waiting()).events())[-1]
    assert any("raise loader.num_workers" in sentence for sentence in last.signals)


def test_healthy_run_reports_no_signal(tmp_path, opened, configure, toy):
    reports = list(opened(configure(epochs=4, optimizer={"lr": 0.01}), tmp_path, toy()).events())
    assert [report.signals for report in reports] == [[], [], [], []]


def test_foreign_lr_is_logged_and_a_signal(tmp_path, opened, configure, toy):
    """train/lr is read from the optimizer: what overwrites it cannot hide behind the plan."""

    class Meddling(toy):
        def loss(self, model, batch):
            for group in trainer._step.optimizer.param_groups:
                group["lr"] = 0.5
            return super().loss(model, batch)

    config = configure(epochs=10, schedule={"name": "linear"}, optimizer={"name": "sgd"})
    trainer = opened(config, tmp_path, Meddling())
    schedule, written = trainer._step.schedule, type(trainer._step.schedule).set_lr
    nowhere = SimpleNamespace(param_groups=[])  # the schedule goes on, and its value gets lost
    schedule.set_lr = lambda optimizer, step: written(schedule, nowhere, step)  # noqa: ARG005
    reports = list(trainer.events())
    assert reports[-1].metrics["train/lr"] == 0.5
    assert any("learning rate was 0.5 in all of the last 20" in s for s in reports[-1].signals)
