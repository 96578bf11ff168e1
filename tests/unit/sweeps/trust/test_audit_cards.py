"""Each card warns of its fault, passes sound sweeps, and knows when it cannot tell."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from sweeps.spec.constraints import parse_constraint
from sweeps.spec.space import Distribution, Uniform
from sweeps.trust.audit.card import Card
from sweeps.trust.audit.data import AuditData, AuditTrial, Clipping
from sweeps.trust.audit.registry import CARDS

Point = dict[str, float]
SPACE: dict[str, Distribution] = {key: Uniform(0.0, 1.0) for key in "abc"}
EMPTY = AuditData(trials=[])


def _points(draw: random.Random, count: int) -> list[Point]:
    return [{key: draw.random() for key in SPACE} for _ in range(count)]


def _searched(
    draw: random.Random, loss: Callable[[Point], float], count: int = 80, noise: float = 0.02
) -> AuditData:
    """A random search over three parameters, whose trials reported once."""
    points = _points(draw, count)
    values = [loss(point) + draw.gauss(0, noise) for point in points]
    trials = [
        AuditTrial(number, "complete", point, value, {1: value})
        for number, (point, value) in enumerate(zip(points, values, strict=True))
    ]
    return AuditData(trials=trials, space=SPACE)


def _inside(draw: random.Random) -> AuditData:
    return _searched(draw, lambda p: abs(p["a"] - 0.5) + abs(p["b"] - 0.4) + abs(p["c"] - 0.6))


def _outside(draw: random.Random) -> AuditData:
    return _searched(draw, lambda p: abs(p["a"] - 1.1) + 0.5 * abs(p["b"] - 0.4))


def _idle(draw: random.Random) -> AuditData:
    return _searched(draw, lambda p: abs(p["a"] - 0.6) + 0.6 * abs(p["b"] - 0.4), 120)


def _repeated(draw: random.Random, gap: float) -> AuditData:
    """Twenty trials, of which the best five were trained with five seeds of deviation 1."""
    means = [0.0, *(gap + index / 2 for index in range(19))]
    trials = [
        AuditTrial(n, "complete", {}, mean + draw.gauss(0, 1)) for n, mean in enumerate(means)
    ]
    seeds = {n: {s: means[n] + draw.gauss(0, 1) for s in range(5)} for n in range(5)}
    return AuditData(trials=trials, repeats=seeds)


def _stopped(draw: random.Random, agreement: float, exempt: int = 30) -> AuditData:
    """ASHA with rungs 1 and 3 of 9, whose values agree with the end more or less."""
    curves = []
    for _ in range(200):
        quality = draw.gauss(0, 1)
        noise = math.sqrt(1 - agreement**2)
        early = {at: agreement * quality + noise * draw.gauss(0, 1) for at in range(1, 9)}
        curves.append(early | {9: quality})
    chosen = set(draw.sample(range(200), exempt))
    first = sorted(curve[1] for curve in curves)[66]
    trials = []
    for number, curve in enumerate(curves):
        whole = number in chosen or curve[1] <= first
        seen = curve if whole else {1: curve[1]}
        trials.append(
            AuditTrial(
                number,
                "complete" if whole else "pruned",
                {},
                seen[max(seen)],
                seen,
                stopped_early=not whole,
                exempt=number in chosen,
            )
        )
    return AuditData(trials=trials, rungs=(1, 3), reports=9)


def _failing(draw: random.Random, fails: Callable[[Point], bool]) -> AuditData:
    trials = []
    for number, point in enumerate(_points(draw, 60)):
        bad = fails(point)
        value = None if bad else point["a"]
        trials.append(
            AuditTrial(number, "failed" if bad else "complete", point, value, counts=not bad)
        )
    return AuditData(trials=trials, space=SPACE)


def _clipped(_draw: random.Random, share: float) -> AuditData:
    clipping = Clipping(1.0, share, 500, 2.5)
    trials = [AuditTrial(n, "complete", {}, 0.1 * n, clipping=clipping) for n in range(5)]
    return AuditData(trials=trials)


def _curves(draw: random.Random, shape: Callable[[float], float]) -> AuditData:
    trials = []
    for number in range(30):
        level = draw.random()
        curve = {e: level + shape(e / 20) + draw.gauss(0, 0.005) for e in range(1, 21)}
        trials.append(AuditTrial(number, "complete", {}, min(curve.values()), curve))
    return AuditData(trials=trials, reports=20)


def _measured(draw: random.Random, samples: int) -> AuditData:
    trials = []
    for number in range(40):
        truth = 0.8 + 0.15 * draw.random()
        value = truth + draw.gauss(0, math.sqrt(truth * (1 - truth) / samples))
        trials.append(AuditTrial(number, "complete", {}, min(1.0, value)))
    return AuditData(trials=trials, metric="val/accuracy", minimize=False, num_validation=samples)


FAULTS: dict[str, Callable[[random.Random], AuditData]] = {
    "bounds": _outside,
    "noise": lambda draw: _repeated(draw, 0.0),
    "stopping": lambda draw: _stopped(draw, 0.1),
    "effects": _idle,
    "failures": lambda draw: _failing(draw, lambda p: p["a"] > 0.6 and p["b"] < 0.4),
    "clipping": lambda draw: _clipped(draw, 0.8),
    "budget": lambda draw: _curves(draw, lambda share: 1 - share / 2),
    "validation": lambda draw: _measured(draw, 40),
}
SOUND: dict[str, Callable[[random.Random], AuditData]] = {
    "bounds": _inside,
    "noise": lambda draw: _repeated(draw, 8.0),
    "stopping": lambda draw: _stopped(draw, 0.95),
    "effects": _inside,
    "failures": lambda draw: _failing(draw, lambda _: draw.random() < 0.04),
    "clipping": lambda draw: _clipped(draw, 0.1),
    "budget": lambda draw: _curves(draw, lambda share: math.exp(-7 * share)),
    "validation": lambda draw: _measured(draw, 100_000),
}
SWEEPS = 40


def _cards(name: str, made: Callable[[random.Random], AuditData]) -> list[Card]:
    return [CARDS[name](made(random.Random(seed))) for seed in range(SWEEPS)]


@pytest.mark.parametrize("name", CARDS)
def test_fault_is_found_in_nine_of_ten_sweeps(name: str) -> None:
    warned = sum(card.verdict == "warn" for card in _cards(name, FAULTS[name]))
    assert warned >= 0.9 * SWEEPS


@pytest.mark.parametrize("name", CARDS)
def test_sound_sweep_warns_in_few_cases(name: str) -> None:
    cards = _cards(name, SOUND[name])
    assert sum(card.verdict == "warn" for card in cards) <= 0.05 * SWEEPS
    assert sum(card.verdict == "pass" for card in cards) >= 0.8 * SWEEPS


@pytest.mark.parametrize("name", CARDS)
def test_no_trials_are_not_enough_data(name: str) -> None:
    """One report is no curve, no rule stops trials, nothing is searched, a loss is no count."""
    card = CARDS[name](EMPTY)
    never = ("bounds", "budget", "stopping", "validation")
    assert card.verdict == ("does not apply" if name in never else "not enough data")
    assert (card.remedy is None) == (name in never), "a card without data says what it needs"
    assert not card.evidence[0].isupper() or name not in never, "it follows 'does not apply: '"


@pytest.mark.parametrize("name", CARDS)
@pytest.mark.parametrize("made", [FAULTS, SOUND], ids=["fault", "sound"])
def test_maximizing_gives_the_same_verdict(
    name: str, made: dict[str, Callable[[random.Random], AuditData]]
) -> None:
    data = made[name](random.Random(1))
    if name == "validation":  # a mirrored accuracy is no accuracy
        mirrored = replace(data, metric="val/error", minimize=True)
        trials = [replace(t, value=1 - (t.value or 0.0)) for t in data.trials]
    else:
        mirrored = replace(data, minimize=not data.minimize)
        trials = [_negated(trial) for trial in data.trials]
        seeds = {n: {s: -v for s, v in one.items()} for n, one in data.repeats.items()}
        mirrored = replace(mirrored, repeats=seeds)
    first, second = CARDS[name](data), CARDS[name](replace(mirrored, trials=trials))
    assert first.verdict == second.verdict


def _negated(trial: AuditTrial) -> AuditTrial:
    curve = {at: -value for at, value in trial.curve.items()}
    return replace(trial, value=None if trial.value is None else -trial.value, curve=curve)


@pytest.mark.parametrize("name", CARDS)
def test_every_verdict_says_from_how_many(name: str) -> None:
    for made in (FAULTS, SOUND):
        card = CARDS[name](made[name](random.Random(2)))
        assert any(character.isdigit() for character in card.evidence)
        assert (card.remedy is not None) == (card.verdict != "pass")


def _region(fails: Callable[[Point], bool]) -> Card:
    return CARDS["failures"](_failing(random.Random(0), fails))


def test_failing_region_of_two_parameters_is_in_words() -> None:
    card = _region(lambda p: p["a"] > 0.6 and p["b"] < 0.4)
    sides = [side[:2] for side in card.figure["region"]["sides"]]
    assert sides == [["a", "above"], ["b", "below"]]
    assert "with a above" in card.evidence
    assert "with b below" in card.evidence


@pytest.mark.parametrize(
    "fails",
    [
        lambda p: p["a"] > 0.6 and p["b"] < 0.4,
        lambda p: p["a"] > 0.6 and p["b"] > 0.6,
        lambda p: p["a"] < 0.4 and p["b"] < 0.4,
    ],
    ids=["above and below", "above both", "below both"],
)
def test_proposed_constraint_leaves_out_the_region(fails: Callable[[Point], bool]) -> None:
    card = _region(fails)
    assert card.command is not None
    text = card.command[-1].removeprefix('search.constraints=["').removesuffix('"]')
    constraint = parse_constraint(text)
    inner = {"a": 0.9, "b": 0.9}
    for point in _points(random.Random(5), 300):
        sides = card.figure["region"]["sides"]
        within = all(
            point[key] > value if side == "above" else point[key] < value
            for key, side, value in sides
        )
        near = any(abs(point[key] - value) < 0.001 for key, _, value in sides)
        assert near or constraint.holds(inner | point) != within


def test_random_failures_have_no_region_but_many_warn() -> None:
    draw = random.Random(0)
    card = CARDS["failures"](_failing(draw, lambda _: draw.random() < 0.4))
    assert (card.verdict, card.figure["region"]) == ("warn", None)


def test_survivors_alone_are_called_biased() -> None:
    data = _stopped(random.Random(0), 0.95, exempt=3)
    card = CARDS["stopping"](data)
    assert card.verdict == "not enough data"
    assert "are survivors, which are alike at the rungs and agree less" in card.evidence
    assert "early_stopping.exempt" in str(card.command)


def test_interaction_is_stated() -> None:
    data = _searched(
        random.Random(0), lambda p: p["c"] + 4 * (p["a"] - 0.5) * (p["b"] - 0.5), count=120
    )
    card = CARDS["effects"](data)
    assert card.verdict == "pass"
    assert set(card.figure["interactions"][0]["keys"]) == {"a", "b"}
    assert "act together" in card.evidence


def test_idle_parameter_is_fixed_at_the_best_value() -> None:
    data = _idle(random.Random(1))
    card = CARDS["effects"](data)
    assert card.figure["without_effect"] == ["c"]
    assert card.command is not None
    best = float(f"{data.ranked[0].params['c']:.4g}")
    assert card.command[-1] == f"space.c={{choice: [{best}]}}"


def test_budget_that_is_too_large_is_shortened() -> None:
    shape: Callable[[float], float] = lambda share: abs(share - 0.2) * (1 if share < 0.2 else 0.3)  # noqa: E731
    card = CARDS["budget"](_curves(random.Random(0), shape))
    assert card.verdict == "warn"
    assert card.command is not None
    assert card.command[-1] in ("budget.epochs=5", "budget.epochs=6", "budget.epochs=7")


@pytest.mark.parametrize(("gap", "tied"), [(8.0, [0, 1]), (0.0, [0])])
def test_noise_says_what_the_confirmation_said(gap: float, tied: list[int]) -> None:
    seeds = replace(_repeated(random.Random(0), gap), tied=tied)
    card = CARDS["noise"](seeds)
    assert card.verdict == ("pass" if len(tied) == 1 else "warn")
    assert card.figure["tied"] == tied


def test_percent_is_read_as_a_share() -> None:
    data = _measured(random.Random(0), 100)
    percent = [replace(t, value=100 * (t.value or 0.0)) for t in data.trials]
    first, second = (CARDS["validation"](one) for one in (data, replace(data, trials=percent)))
    assert first.figure["gap"] == pytest.approx(second.figure["gap"])


@pytest.mark.parametrize(("samples", "verdict"), [(20_000, "pass"), (40, "warn")])
def test_validation_is_large_enough_for_a_sampler_that_crowds(samples: int, verdict: str) -> None:
    """Most trials are as good as the best one; those from before it had learned are not."""
    draw = random.Random(0)
    found = [0.80 + 0.01 * n for n in range(10)] + [0.95 + 1e-4 * draw.random() for _ in range(90)]
    trials = [AuditTrial(n, "complete", {}, value) for n, value in enumerate(found)]
    card = CARDS["validation"](
        AuditData(trials=trials, metric="val/acc", minimize=False, num_validation=samples)
    )
    assert card.verdict == verdict
    assert card.figure["gained"] == pytest.approx(max(found) - 0.845)


def _crowded(seed: int, *, acting: bool) -> AuditData:
    """A search whose later, better trials have one value at the end of its range."""
    draw, trials = random.Random(seed), []
    for number in range(60):
        other = draw.random() if number < 20 else draw.gauss(0.5, 0.05)
        crowded = draw.random() if number < 20 else 1 - 0.1 * draw.random()
        loss = abs(other - 0.5) + acting * (1 - crowded) + draw.gauss(0, 0.01)
        point = {"a": other, "b": crowded}
        trials.append(AuditTrial(number, "complete", point, loss, {1: loss}))
    return AuditData(trials=trials, space={key: SPACE[key] for key in "ab"})


def test_crowded_parameter_without_effect_is_not_at_a_bound() -> None:
    for acting, verdict in ((True, "warn"), (False, "pass")):
        cards = [CARDS["bounds"](_crowded(seed, acting=acting)) for seed in range(10)]
        assert sum(card.verdict == verdict for card in cards) >= 9


@pytest.mark.parametrize("card", ["bounds", "effects"])
def test_equal_results_rank_no_trials(card: str) -> None:
    """Neither is anything sound, nor would more trials help: the metric shows nothing."""
    found = CARDS[card](_searched(random.Random(0), lambda _: 1.0, noise=0.0))
    assert found.verdict == "not enough data"
    assert found.evidence == "All 80 trials with a result have the same val/loss."
    assert found.remedy == "see whether the model learns, and whether the metric can show it"
