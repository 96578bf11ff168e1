"""Learning rate schedules equal torch's at every step."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler as theirs

from trainable.config import ScheduleConfig, TrainConfig
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


def _schedule(total=TOTAL, *, mode="min", **options):
    return Schedule(
        ScheduleConfig(**options),
        peak=PEAK,
        total_steps=total,
        steps_per_epoch=PER_EPOCH,
        mode=mode,
    )


def _ours(**options):
    schedule = _schedule(**options)
    return [PEAK * schedule.factor(step) for step in range(TOTAL)]


THEIRS = {
    "cosine": (
        {"final": 0.1},
        lambda o, left: theirs.CosineAnnealingLR(o, left, eta_min=0.1 * PEAK),
    ),
    "linear": (
        {"final": 0.1},
        lambda o, left: theirs.LinearLR(o, start_factor=1.0, end_factor=0.1, total_iters=left),
    ),
    "constant": ({}, lambda o, _: theirs.ConstantLR(o, factor=1.0, total_iters=1)),
    "polynomial": ({"power": 0.9}, lambda o, left: theirs.PolynomialLR(o, left, 0.9)),
    "exponential": (
        {"gamma": 0.3, "step_epochs": 2},
        lambda o, _: theirs.ExponentialLR(o, 0.3 ** (1 / (PER_EPOCH * 2))),
    ),
}


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("name", THEIRS)
def test_curve_equals_that_of_torch(name, warmup):
    options, make = THEIRS[name]
    expected = _torch_curve(_after_warmup(warmup, lambda o: make(o, TOTAL - warmup)))
    found = _ours(name=name, warmup=warmup, **options)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["cosine", "linear", "polynomial"])
def test_final_rate_lifts_the_curve(name):
    whole, lifted = _ours(name=name), _ours(name=name, final=0.5)
    assert lifted == pytest.approx([PEAK / 2 + one / 2 for one in whole], abs=1e-12)


@pytest.mark.seeds("S10")
@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3, 18])
def test_onecycle(warmup):
    share = warmup / TOTAL if isinstance(warmup, int) else warmup
    optimizer = _optimizer()
    scheduler = theirs.OneCycleLR(
        optimizer, max_lr=PEAK, total_steps=TOTAL, pct_start=share, cycle_momentum=False
    )
    expected = [optimizer.param_groups[0]["lr"]]
    for _ in range(TOTAL - 1):
        optimizer.step()
        scheduler.step()
        expected.append(optimizer.param_groups[0]["lr"])
    assert _ours(name="onecycle", warmup=warmup) == pytest.approx(expected, abs=1e-12)


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
    schedule = _schedule(name="plateau", gamma=0.5, patience=0, warmup=15)
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
    schedule = _schedule(name="plateau", gamma=0.5, patience=2, mode=mode)
    values = [5.0, 4.0, 4.0, 4.0, 4.0, 3.9, math.nan, 4.1, 4.2, 4.3, 6.0, 6.0, 6.0, 6.0, 6.1]
    for epoch, value in enumerate(values):
        reference.step(value)
        schedule.observe(value, (epoch + 1) * PER_EPOCH)
        assert schedule.factor(0) * PEAK == pytest.approx(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_not_finite_is_no_improvement(mode, value):
    schedule = _schedule(name="plateau", gamma=0.5, patience=1, mode=mode)
    found = []
    for one in (value, 1.0, value, value, 1.0, 1.0):
        schedule.observe(one, PER_EPOCH)
        found.append(schedule.factor(0))
    assert found == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25]


def test_plateau_ignores_the_warmup_and_survives_a_restart():
    options = {"name": "plateau", "gamma": 0.5, "patience": 0, "warmup": 12}
    schedule, again = _schedule(**options), _schedule(**options)
    for value in (1.0, 2.0, 3.0):
        schedule.observe(value, 6)
    assert schedule.factor(12) == 1.0
    schedule.observe(1.0, 12)
    schedule.observe(2.0, 18)
    assert schedule.factor(18) == 0.5
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
    schedule = _schedule(10, name="linear")
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


@pytest.mark.parametrize("warmup", [0, 6])
@pytest.mark.parametrize(("cycles", "growth", "first"), [(3, 1, 18), (2, 2, 18), (1, 1, 54)])
def test_cosine_restarts(warmup, cycles, growth, first):
    total = first * cycles if growth == 1 else first * (growth**cycles - 1) // (growth - 1)
    cycling = {"cycles": cycles, "cycle_growth": float(growth)}
    schedule = _schedule(
        total + warmup, name="cosine_restarts", warmup=warmup, final=0.1, **cycling
    )
    expected = _torch_curve(
        lambda o: theirs.CosineAnnealingWarmRestarts(o, first, growth, eta_min=0.1 * PEAK)
    )
    found = [PEAK * schedule.factor(warmup + step) for step in range(total)]
    assert found == pytest.approx(expected[:total], abs=1e-12)
    assert schedule.factor(total + warmup) == pytest.approx(0.1)


@pytest.mark.parametrize("warmup", [1, 4, 4000])
def test_inverse_sqrt_is_the_transformer_schedule(warmup):
    # Vaswani et al. (2017), equation 3, with steps that count from 1, divided by its peak
    def noam(step):
        return min(step**-0.5, step * warmup**-1.5) / warmup**-0.5

    schedule = _schedule(10_000, name="inverse_sqrt", warmup=warmup - 1)
    for step in range(1, 10_000, 7):
        assert schedule.factor(step - 1) == pytest.approx(noam(step), rel=1e-12)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("decay", [0.25, 15, 1.5 / TOTAL])
def test_wsd(shape, final, decay):
    # Haegele et al. (2024), equation 1 and figure 3, with N, N_decay and N_warmup in steps
    length = decay if isinstance(decay, int) else round(decay * TOTAL)
    weights = {
        "linear": lambda x: 1 - x,
        "cosine": lambda x: math.cos(math.pi * x / 2) ** 2,
        "sqrt": lambda x: 1 - x**0.5,
    }

    def formula(n):
        if n < 7:
            return (n + 1) / 8
        if n <= TOTAL - length:
            return 1.0
        left = weights[shape]((n - (TOTAL - length)) / length)
        return left + final * (1 - left)

    found = _ours(name="wsd", warmup=7, decay=decay, decay_shape=shape, final=final)
    assert found == pytest.approx([PEAK * formula(n) for n in range(TOTAL)], abs=1e-12)


@pytest.mark.parametrize("name", ["wsd", "cosine_restarts", "polynomial", "inverse_sqrt"])
def test_factors_of_long_runs_stay_in_range(name):
    for total in (1, 2, 3, 97):
        schedule = _schedule(total, name=name, decay=1, cycles=3, cycle_growth=1.7)
        factors = [schedule.factor(step) for step in range(total + 1)]
        assert factors[0] == 1.0
        assert all(0.0 <= factor <= 1.0 for factor in factors)


def test_warmup_and_decay_must_fit_into_the_run():
    with pytest.raises(ConfigError) as refused:
        _schedule(60, name="wsd", warmup=10, decay=51)
    assert refused.value.key == "train.schedule.decay"
    _schedule(61, name="wsd", warmup=10, decay=51)


def half_way(step, total, config):
    return config.schedule.arguments["high"] if step < total / 2 else 0.5


def fails(step, _total, _config):
    return (1.0, float("nan"))[step] if step < 2 else 1 / 0


def takes_two(_step, _total):
    return 1.0


def _own(name, **arguments):
    train = TrainConfig(schedule={"name": f"{__name__}:{name}", "arguments": arguments})
    return Schedule(train.schedule, peak=2.0, total_steps=10, steps_per_epoch=5, train=train)


def test_own_function_makes_the_factor():
    schedule = _own("half_way", high=0.9)
    assert [schedule.factor(step) for step in range(10)] == [0.9] * 5 + [0.5] * 5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=3.0)
    optimizer.param_groups[0]["initial_lr"] = 3.0
    schedule.set_lr(optimizer, 7)
    assert optimizer.param_groups[0]["lr"] == 1.5
    assert schedule.lr == 1.0


@pytest.mark.parametrize("name", ["takes_two", "missing", "TOTAL", "ScheduleConfig"])
def test_what_is_no_schedule_function_is_refused(name):
    with pytest.raises(ConfigError) as refused:
        _own(name)
    assert refused.value.key == "train.schedule.name"


@pytest.mark.parametrize("step", [1, 2])
def test_own_function_without_a_factor_is_refused(step):
    schedule = _own("fails")
    with pytest.raises(ConfigError) as refused:
        schedule.factor(step)
    assert refused.value.key == "train.schedule.name"
