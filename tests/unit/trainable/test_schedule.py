"""Learning rate schedules equal torch's at every step."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler as theirs

from trainable.config import ScheduleConfig
from trainable.errors import ConfigError
from trainable.schedule import Schedule, warmup_steps

TOTAL, PER_EPOCH, PEAK = 60, 6, 0.4


def _optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=PEAK)


def _torch_curve(make):
    optimizer = _optimizer()
    scheduler = make(optimizer)
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            # SequentialLR steps its parts by epoch number, which torch itself deprecates.
            warnings.simplefilter("ignore", UserWarning)
            scheduler.step()
    return rates


def _after_warmup(warmup, make):
    def chained(optimizer):
        if warmup == 0:
            return make(optimizer)
        ramp = theirs.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return theirs.SequentialLR(optimizer, [ramp, make(optimizer)], milestones=[warmup])

    return chained


def _ours(**options):
    schedule = Schedule(
        ScheduleConfig(**options), peak=PEAK, total_steps=TOTAL, steps_per_epoch=PER_EPOCH
    )
    return [PEAK * schedule.factor(step) for step in range(TOTAL)]


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine(warmup, final):
    expected = _torch_curve(
        _after_warmup(
            warmup,
            lambda o: theirs.CosineAnnealingLR(o, TOTAL - warmup, eta_min=final * PEAK),
        )
    )
    assert _ours(name="cosine", warmup=warmup, final=final) == pytest.approx(expected, abs=1e-12)


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_linear(warmup, final):
    expected = _torch_curve(
        _after_warmup(
            warmup,
            lambda o: theirs.LinearLR(
                o, start_factor=1.0, end_factor=final, total_iters=TOTAL - warmup
            ),
        )
    )
    assert _ours(name="linear", warmup=warmup, final=final) == pytest.approx(expected, abs=1e-12)


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [0, 5])
def test_constant(warmup):
    expected = _torch_curve(
        _after_warmup(warmup, lambda o: theirs.ConstantLR(o, factor=1.0, total_iters=1))
    )
    assert _ours(name="constant", warmup=warmup) == pytest.approx(expected, abs=1e-12)


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3, 18])
def test_onecycle(warmup):
    share = warmup / TOTAL if isinstance(warmup, int) else warmup
    expected = _onecycle(share)
    assert _ours(name="onecycle", warmup=warmup) == pytest.approx(expected, abs=1e-12)


def _onecycle(share):
    optimizer = _optimizer()
    scheduler = theirs.OneCycleLR(
        optimizer, max_lr=PEAK, total_steps=TOTAL, pct_start=share, cycle_momentum=False
    )
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(TOTAL - 1):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.seeds("S10")
def test_step_decay():
    expected = _torch_curve(lambda o: theirs.StepLR(o, step_size=3 * PER_EPOCH, gamma=0.5))
    assert _ours(name="step", step_epochs=3, gamma=0.5) == pytest.approx(expected, abs=1e-12)


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [1, 7, 40])
def test_step_decay_counts_epochs_through_the_warmup(warmup):
    expected = [
        PEAK * min(1, (step + 1) / (warmup + 1)) * 0.5 ** (step // (3 * PER_EPOCH))
        for step in range(TOTAL)
    ]
    found = _ours(name="step", warmup=warmup, step_epochs=3, gamma=0.5)
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.seeds("S10")
def test_plateau_after_a_warmup():
    """Evaluated after each epoch of 6 steps, never better: the first after the warmup of 15 (that
    of step 18) is the best, and from the second on each one drops.
    """
    schedule = Schedule(
        ScheduleConfig(name="plateau", gamma=0.5, patience=0, warmup=15),
        peak=PEAK,
        total_steps=TOTAL,
        steps_per_epoch=PER_EPOCH,
    )
    optimizer, rates = _optimizer(), []
    optimizer.param_groups[0]["initial_lr"] = PEAK
    for step in range(TOTAL):
        schedule.set_lr(optimizer, step)
        rates.append(optimizer.param_groups[0]["lr"])
        if (step + 1) % PER_EPOCH == 0:
            schedule.observe(1.0, step + 1)
    expected = [PEAK * (step + 1) / 16 for step in range(15)] + [PEAK] * 9
    for drops in range(1, 7):
        expected += [PEAK * 0.5**drops] * PER_EPOCH
    assert rates == pytest.approx(expected, abs=1e-12)


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("mode", ["min", "max"])
def test_plateau(mode):
    optimizer = _optimizer()
    reference = theirs.ReduceLROnPlateau(optimizer, mode=mode, factor=0.5, patience=2)
    schedule = Schedule(
        ScheduleConfig(name="plateau", gamma=0.5, patience=2),
        peak=PEAK,
        total_steps=TOTAL,
        steps_per_epoch=PER_EPOCH,
        mode=mode,
    )
    values = [5.0, 4.0, 4.0, 4.0, 4.0, 3.9, math.nan, 4.1, 4.2, 4.3, 6.0, 6.0, 6.0, 6.0, 6.1]
    for epoch, value in enumerate(values):
        reference.step(value)
        schedule.observe(value, (epoch + 1) * PER_EPOCH)
        assert schedule.factor(0) * PEAK == pytest.approx(optimizer.param_groups[0]["lr"])


def test_plateau_ignores_the_warmup_and_survives_a_restart():
    config = ScheduleConfig(name="plateau", gamma=0.5, patience=0, warmup=12)

    def make():
        return Schedule(config, peak=PEAK, total_steps=TOTAL, steps_per_epoch=PER_EPOCH)

    schedule = make()
    for value in (1.0, 2.0, 3.0):
        schedule.observe(value, 6)
    assert schedule.factor(12) == 1.0
    schedule.observe(1.0, 12)
    schedule.observe(2.0, 18)
    assert schedule.factor(18) == 0.5
    again = make()
    again.load_state_dict(schedule.state_dict())
    schedule.observe(2.0, 24)
    again.observe(2.0, 24)
    assert schedule.factor(24) == again.factor(24) == 0.25


def test_groups_keep_their_multipliers():
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(
        [
            {"params": [parameters[0]], "initial_lr": PEAK},
            {"params": [parameters[1]], "initial_lr": PEAK * 0.1},
        ],
        lr=PEAK,
    )
    schedule = Schedule(
        ScheduleConfig(name="linear"), peak=PEAK, total_steps=10, steps_per_epoch=5
    )
    schedule.set_lr(optimizer, 5)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([PEAK / 2, PEAK / 20])
    assert schedule.lr == pytest.approx(PEAK / 2)


@pytest.mark.seeds("S11")
@pytest.mark.parametrize(
    ("warmup", "total", "expected"), [(0.1, 60, 6), (0.29, 100, 29), (7, 60, 7), (0.0, 1, 0)]
)
def test_warmup_is_a_fraction_or_a_count(warmup, total, expected):
    assert warmup_steps(warmup, total) == expected


def test_warmup_as_long_as_the_run_shows_both_numbers():
    with pytest.raises(ConfigError, match="warmup: 60 steps of 60 steps in all"):
        warmup_steps(60, 60)
