"""Priors: which trials are drawn around them, with which values, and what the evidence changes."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from sweeps.ledger.attributes import PRIORS
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.ledger.reader import LedgerReader
from sweeps.paths import SweepPaths
from sweeps.search.dry_run import dry_run
from sweeps.search.prior_trials import Comparison, PriorTrials, draw
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.search.suggest import Suggester
from sweeps.spec.priors import Prior
from sweeps.spec.space import Choice, Distribution, Int, LogInt, LogUniform, QUniform, Uniform
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.slices import samplers, sliced
from tests.unit.sweeps.search.trial_history import empty_ledger

SPEC = """
name: priors
task: digits
metric: val/loss
mode: min
trials: 40
budget: {{epochs: 9}}
space: {space}
search: {search}
early_stopping: {{scheduler: asha_promote, grace_epochs: 1, reduction: 3}}
"""
SPACE = (
    "{train.optimizer.lr: {loguniform: [1.0e-5, 1.0], prior: 3.0e-4}, "
    "train.clip.max_norm: {loguniform: [0.1, 10]}}"
)
CONDITIONAL = (
    "{train.optimizer.name: {choice: [sgd, adamw], prior: sgd}, train.optimizer.momentum: "
    "{uniform: [0.0, 0.99], prior: 0.9, prior_width: 0.02, when: {train.optimizer.name: sgd}}, "
    "train.clip.max_norm: {loguniform: [0.1, 10]}}"
)
ONLY_CONDITIONAL = CONDITIONAL.replace(", prior: sgd", "")
MOMENTUM = "train.optimizer.momentum"
LR, NORM = "train.optimizer.lr", "train.clip.max_norm"
SAMPLERS = ["tpe", "gp", "random", "qmc", "cmaes", "nsgaii"]


def _spec(space: str = SPACE, search: str = "{try_first: [], startup_trials: 4}") -> SweepSpec:
    return parse_spec(SPEC.format(space=space, search=search), "priors.yaml")


Loss = Callable[[Mapping[str, Any]], float]


def _train(ledger: Ledger, suggestion: Suggestion, loss: Loss) -> None:
    """Add a trial that stops after an epoch."""
    number = ledger.add(suggestion).number
    ledger.report(number, epoch=1, step=1, value=loss(suggestion.params))
    ledger.finish(number, "pruned")


def _search(
    spec: SweepSpec,
    loss: Loss = lambda _: 0.5,
    *,
    trials: int = 40,
    ledger: Ledger | None = None,
    each_driver: bool = False,
) -> list[FrozenTrial]:
    """Search until there are so many trials; with a new driver for each, or one for all."""
    ledger = ledger or empty_ledger(spec)
    suggester = Suggester(spec, ledger)
    for number in range(len(ledger.frozen_trials()), trials):
        now = Suggester(spec, ledger) if each_driver else suggester
        _train(ledger, now.propose(number), loss)
    return ledger.frozen_trials()


def _around(trials: list[FrozenTrial]) -> list[int]:
    """Return the numbers of the trials that were drawn around priors."""
    return [trial.number for trial in trials if PRIORS in trial.user_attrs]


def _is_good_at_small_rates(params: Mapping[str, Any]) -> float:
    return float(params[LR])


def _is_good_at_large_rates(params: Mapping[str, Any]) -> float:
    return 1 - float(params.get(LR, 0))


@pytest.mark.parametrize(
    ("distribution", "value"),
    [
        (LogUniform(1e-5, 1.0), 3e-4),
        (Uniform(0.0, 1.0), 0.0),
        (QUniform(0.0, 1.0, 0.1), 0.3),
        (Int(1, 99, 2), 51),
        (LogInt(1, 1000), 30),
    ],
)
def test_draws_lie_around_the_prior(distribution: Distribution, value: Any) -> None:
    generator = random.Random(0)
    drawn = [draw(Prior(value, 0.1), distribution, generator) for _ in range(2000)]
    assert all(map(distribution.contains, drawn))
    middle = distribution.share(value)
    shares = [distribution.share(one) for one in drawn]
    spread = statistics.mean((share - middle) ** 2 for share in shares) ** 0.5
    assert spread == pytest.approx(0.1, rel=0.15)
    if 0.3 < middle < 0.7:
        assert statistics.mean(shares) == pytest.approx(middle, abs=0.02)


def test_width_of_a_choice_is_the_chance_of_others() -> None:
    choice, generator = Choice(("a", "b", "c")), random.Random(0)
    drawn = Counter(draw(Prior("b", 0.3), choice, generator) for _ in range(3000))
    assert drawn["b"] / 3000 == pytest.approx(0.7, abs=0.03)
    assert drawn["a"] / 3000 == pytest.approx(0.15, abs=0.03)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.999])
@pytest.mark.parametrize(
    "distribution",
    [Int(1, 9, 2), LogInt(1, 100), QUniform(0.0, 1.0, 0.1), Choice(("a", "b", "c"))],
)
def test_a_value_s_share_leads_back_to_it(distribution: Distribution, share: float) -> None:
    value = distribution.at(share)
    assert distribution.at(distribution.share(value)) == value


@pytest.mark.parametrize("sampler", samplers(*SAMPLERS))
def test_first_trial_of_the_priors_has_their_values(sampler: str) -> None:
    spec = _spec(search=f"{{sampler: {sampler}, try_first: [{{{LR}: 0.5}}], startup_trials: 4}}")
    dry_run(spec)
    trials = _search(spec, _is_good_at_small_rates, trials=9)
    assert [trial.params[LR] for trial in trials[:2]] == [0.5, 3e-4]
    assert _around(trials)[0] == 1
    assert 2 <= len(_around(trials)) < 8
    assert len({trial.params[NORM] for trial in trials}) >= 5  # the sampler's, in each


def test_a_new_driver_for_each_trial_draws_the_same() -> None:
    once, each = (
        _search(_spec(), _is_good_at_small_rates, trials=20, each_driver=new)
        for new in (False, True)
    )
    assert [one.params for one in once] == [one.params for one in each]
    assert _around(once) == _around(each)


def test_evidence_drops_a_wrong_prior() -> None:
    spec = _spec()
    right = _search(spec, _is_good_at_small_rates)
    wrong = _search(spec, _is_good_at_large_rates)
    assert len(_around(right)) >= 6
    assert len(_around(wrong)) <= 2


def test_share_falls_with_the_trials() -> None:
    priors = PriorTrials(_spec())
    first = _trial(TrialState.PRUNED, 0.5)
    first.user_attrs = {PRIORS: priors.digest}
    taken = [priors.takes(number, [first, _rival(0.9)]) for number in range(2, 2000)]
    early, later, late = taken[:40], taken[200:400], taken[1000:]
    assert sum(early) / 40 > 0.2
    assert 0 < sum(later) / 200 < 0.1
    assert not any(late)


def test_no_trial_around_priors_before_a_comparison() -> None:
    priors = PriorTrials(_spec())
    first = _trial(TrialState.PRUNED, 0.5)
    first.user_attrs = {PRIORS: priors.digest}
    for others in ([], [_rival(0.4)]):
        assert not any(priors.takes(number, [first, *others]) for number in range(2, 40))
    assert any(priors.takes(number, [first, _rival(0.6)]) for number in range(2, 40))


def test_priors_themselves_are_tried_before_others() -> None:
    ledger = empty_ledger(_spec())
    suggester = Suggester(_spec(), ledger)
    for number in range(16):
        ledger.add(suggester.propose(number))
    assert _around(ledger.frozen_trials()) == [0]


@pytest.mark.parametrize("space", [SPACE, ONLY_CONDITIONAL])
@pytest.mark.parametrize("sampler", ["random", "qmc"])
def test_priors_take_nothing_from_the_sampler_s_sequence(sampler: str, space: str) -> None:
    search = f"{{sampler: {sampler}, try_first: []}}"
    without = _search(_spec(re.sub(r", prior[^,}]*", "", space), search))
    trials = _search(_spec(space, search), _is_good_at_large_rates)
    around = _around(trials)
    assert around
    rest = [trial.params for trial in trials if trial.number not in around]
    assert rest == [trial.params for trial in without[: len(rest)]]
    assert not {trials[number].params[NORM] for number in around} & {p[NORM] for p in rest}


@pytest.mark.parametrize("sampler", samplers(*SAMPLERS))
def test_more_trials_repeat_no_value_of_earlier_ones(sampler: str) -> None:
    """What a resume with more trials draws is not what was drawn around priors."""
    spec = _spec(search=f"{{sampler: {sampler}, try_first: [], startup_trials: 40}}")
    ledger = empty_ledger(spec)
    for count in (10, 40):
        shorter = spec.model_copy(update={"trials": count})
        trials = _search(shorter, _is_good_at_small_rates, trials=count, ledger=ledger)
    drawn = [trial.params[NORM] for trial in trials]
    assert len(_around(trials)) > 3
    assert len({f"{norm:.12g}" for norm in drawn}) == len(drawn)


def test_conditional_parameter_has_its_prior_where_it_exists() -> None:
    trials = _search(_spec(CONDITIONAL))
    first, *rest = (trials[number].params for number in _around(trials))
    assert (first["train.optimizer.name"], first[MOMENTUM]) == ("sgd", 0.9)
    momenta = [one[MOMENTUM] for one in rest if MOMENTUM in one]
    assert all(0.8 < momentum < 0.99 for momentum in momenta)
    assert len(momenta) >= 3


@pytest.mark.parametrize("sampler", ["random", "tpe", "qmc"])
@pytest.mark.parametrize("seed", sliced(range(4), lambda seed: seed == 0))
def test_trial_without_a_parameter_that_has_a_prior_tells_nothing_of_priors(
    sampler: str, seed: int
) -> None:
    """Where it is bad, the priors are tried all the same; where it is good, no less."""
    search = f"{{sampler: {sampler}, try_first: [], startup_trials: 4}}"
    spec = _spec(ONLY_CONDITIONAL, search).model_copy(update={"seed": seed})

    def is_good_at_the_prior(params: Mapping[str, Any]) -> float:
        return abs(params[MOMENTUM] - 0.9) if MOMENTUM in params else 1.0

    trials = _search(spec, is_good_at_the_prior)
    around = [trials[number].params for number in _around(trials)]
    assert around[0][MOMENTUM] == 0.9
    assert all(MOMENTUM in params for params in around)
    assert len(around) >= 4


def test_constraints_hold_around_priors() -> None:
    search = f'{{try_first: [], constraints: ["{LR} < 3.0e-4"]}}'
    trials = _search(_spec(search=search))
    assert all(trial.params[LR] < 3e-4 for trial in trials)
    assert len(_around(trials)) >= 5


def test_constraints_that_forbid_all_near_priors() -> None:
    space = SPACE.replace("prior: 3.0e-4", "prior: 1.0e-5, prior_width: 0.01")
    spec = _spec(space, f'{{try_first: [], constraints: ["{LR} > 0.1"]}}')
    trials = _search(spec, trials=10)
    assert not _around(trials)
    assert all(trial.params[LR] > 0.1 for trial in trials)


def test_no_point_is_tried_twice_around_priors() -> None:
    spec = _spec("{train.accumulation: {choice: [1, 2, 4, 8], prior: 2}}")
    trials = _search(spec, trials=4)
    assert sorted(trial.params["train.accumulation"] for trial in trials) == [1, 2, 4, 8]
    assert trials[0].params["train.accumulation"] == 2


def test_trial_0_with_the_priors_leaves_room_around_them() -> None:
    spec = _spec(
        "{train.optimizer.lr: {loguniform: [1.0e-5, 1.0]}}",
        "{priors: defaults, try_first: [{train.optimizer.lr: 3.0e-4}]}",
    )
    first, second = _search(spec, trials=2)
    assert PRIORS in second.user_attrs
    assert abs(math.log10(second.params[LR] / first.params[LR])) > 0.05


def test_resume_with_another_prior_begins_with_it() -> None:
    without = _spec(SPACE.replace(", prior: 3.0e-4", ""))
    assert without.search_space().digest() == _spec().search_space().digest()
    ledger = empty_ledger(without)
    assert not _around(_search(without, _is_good_at_small_rates, trials=6, ledger=ledger))
    for trials, value in ((12, 3e-4), (18, 2e-5)):
        spec = _spec(SPACE.replace("3.0e-4", str(value)))
        made = _search(spec, _is_good_at_small_rates, trials=trials, ledger=ledger)
        assert made[trials - 6].params[LR] == value
        assert trials - 6 in _around(made)


def test_ledger_keeps_what_was_drawn_around_priors(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "ledger.db", mode="min", sweep_id="s")
    suggester = Suggester(_spec(), ledger)
    for number in range(2):
        ledger.add(suggester.propose(number))
    assert [trial.from_priors for trial in ledger.trials()] == [True, False]
    records = LedgerReader(tmp_path / "ledger.db").records()
    assert [record.from_priors for record in records] == [True, False]


def test_optimizer_defaults_are_weak_priors() -> None:
    space = (
        "{train.optimizer.name: {choice: [sgd, adamw]}, "
        "train.optimizer.lr: {loguniform: [1.0e-5, 1.0]}, "
        "train.optimizer.weight_decay: {loguniform: [1.0e-5, 1.0]}, "
        "train.optimizer.betas: {choice: [[0.8, 0.9], [0.9, 0.999]], "
        "when: {train.optimizer.name: adamw}}}"
    )
    spec = _spec(space, "{try_first: [], priors: defaults}")
    first = _search(spec, trials=1)[0]
    assert PRIORS in first.user_attrs
    sgd = first.params["train.optimizer.name"] == "sgd"
    assert first.params[LR] == (0.1 if sgd else 3e-4)
    if not sgd:
        assert first.params["train.optimizer.weight_decay"] == 0.01
        assert first.params["train.optimizer.betas"] == "[0.9, 0.999]"


def _trial(state: TrialState, *reports: float, reason: str = "non_finite: nan") -> FrozenTrial:
    return create_trial(
        state=state,
        user_attrs={"reason": reason} if state == TrialState.FAIL else {},
        value=min(reports) if state == TrialState.COMPLETE else None,
        intermediate_values=dict(enumerate(reports, start=1)),
    )


def _rival(loss: float) -> FrozenTrial:
    trial = _trial(TrialState.PRUNED, loss)
    trial.number = 1
    return trial


@pytest.mark.parametrize(
    ("own", "other", "is_better"),
    [
        ((TrialState.PRUNED, 0.5), (TrialState.COMPLETE, 0.6, 0.1, 0.1), True),
        ((TrialState.PRUNED, 0.5, 0.5, 0.4), (TrialState.COMPLETE, 0.6, 0.1, 0.1), False),
        ((TrialState.PRUNED, 0.9), (TrialState.FAIL, 0.1), True),
        ((TrialState.FAIL, 0.1), (TrialState.RUNNING, 0.9), False),
    ],
)
def test_trials_compare_at_their_last_common_rung(
    own: tuple[Any, ...], other: tuple[Any, ...], is_better: bool
) -> None:
    comparison = Comparison((1, 3), (True,), "checkpoint")
    assert comparison.wins([_trial(*own)], [_trial(*other)]) == (0.5 if is_better else 0.25)


def test_trial_without_a_report_is_no_evidence() -> None:
    comparison = Comparison((1, 3), (True,), "checkpoint")
    running, reported = [_trial(TrialState.RUNNING)], [_trial(TrialState.RUNNING, 0.1)]
    assert comparison.wins(running, reported) is None
    assert comparison.wins(reported, running) == 0.25


def test_lost_worker_says_nothing_of_the_priors() -> None:
    comparison = Comparison((1, 3), (True,), "checkpoint")
    lost = _trial(TrialState.FAIL, 0.1, reason="lost: the worker was killed")
    assert comparison.wins([lost], [_trial(TrialState.PRUNED, 0.9)]) == 0.5


@pytest.mark.parametrize("state", [TrialState.FAIL, TrialState.PRUNED, TrialState.RUNNING])
def test_priors_are_tried_again_if_nothing_was_shown(state: TrialState) -> None:
    priors = PriorTrials(_spec())
    first = _trial(state, reason="lost: the worker was killed")
    first.user_attrs = {**first.user_attrs, PRIORS: priors.digest}
    taken = sum(priors.takes(number, [first]) for number in range(1, 40))
    assert (taken > 4) is (state != TrialState.RUNNING)


def test_several_metrics_compare_by_dominance() -> None:
    def trial(*values: float) -> FrozenTrial:
        return create_trial(state=TrialState.PRUNED, user_attrs={"report 1": list(values)})

    comparison = Comparison((1,), (True, False), "checkpoint")
    rival = [trial(0.2, 0.8)]
    worse, neither, better = (
        comparison.wins([one], rival)
        for one in (trial(0.3, 0.7), trial(0.1, 0.7), trial(0.1, 0.9))
    )
    assert worse is not None
    assert better is not None
    assert worse < neither < better


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc"])
def test_priors_wait_for_reports_that_are_still_written(tmp_path: Path, sampler: str) -> None:
    """The evidence is that of all reports so far, however late the driver writes them."""
    text = SPEC.format(space=SPACE, search=f"{{sampler: {sampler}, try_first: []}}")
    spec = parse_spec(text, "priors.yaml", ("early_stopping.scheduler=none",))
    around = []
    for is_late in (False, True):
        ledger = Ledger.create(tmp_path / f"{is_late}.db", mode="min", sweep_id="s")
        queued: list[Callable[[], None]] = []

        def flush(queued: list[Callable[[], None]] = queued) -> None:
            while queued:
                queued.pop(0)()

        searcher = LedgerSearcher(
            ledger,
            spec,
            SweepPaths(tmp_path, "priors"),
            DriverCallbacks(fence=lambda: None, refuse=lambda *_: None, flush=flush),
            Capacity(50, 1),
        )
        for turn in range(30):
            config = searcher.suggest(f"t{turn}")
            value = config["params"][LR]
            queued.append(partial(ledger.report, config["number"], epoch=1, step=1, value=value))
            if not is_late:
                flush()
        around.append([trial.number for trial in ledger.trials() if trial.from_priors])
    assert around[0] == around[1]
    assert len(around[0]) > 3  # small rates are better, so that the priors prove right


NAME = "train.optimizer.name"
BOTH_ORDERS = [
    f"{{{NAME}: {{choice: [sgd, adamw]}}, {LR}: {{loguniform: [1.0e-5, 1.0]}}}}",
    f"{{{LR}: {{loguniform: [1.0e-5, 1.0]}}, {NAME}: {{choice: [sgd, adamw]}}}}",
    f"{{{LR}: {{loguniform: [1.0e-5, 1.0]}}, a: {{choice: [x]}}, "
    f"{NAME}: {{choice: [sgd, adamw], when: {{a: x}}}}}}".replace("a:", "task.a:"),
]


def _with_defaults(space: str, seed: int) -> SweepSpec:
    search = "{try_first: [], priors: defaults}"
    return _spec(space, search).model_copy(update={"seed": seed})


@pytest.mark.parametrize("space", BOTH_ORDERS, ids=["name first", "name last", "with condition"])
def test_a_trial_has_the_defaults_of_its_own_optimizer_in_any_order(space: str) -> None:
    for option in ("sgd", "adamw"):
        file = f"train: {{optimizer: {{name: {option}}}}}\n"
        taken = {}
        for seed in range(6):
            spec = parse_spec(
                SPEC.format(space=space, search="{try_first: [], priors: defaults}") + file, "p"
            ).model_copy(update={"seed": seed})
            first = Suggester(spec, empty_ledger(spec)).propose(0)
            assert first.priors is not None
            taken[first.params[NAME]] = first.params[LR]
        assert taken == pytest.approx({"sgd": 0.1, "adamw": 3e-4})


def test_space_without_late_optimizer_keeps_its_order() -> None:
    clip_first = f"{{{NORM}: {{loguniform: [0.1, 10]}}, {BOTH_ORDERS[0][1:]}"
    for space in (BOTH_ORDERS[0], clip_first):
        assert PriorTrials(_with_defaults(space, 0)).values(0, 0, []).first == ()
