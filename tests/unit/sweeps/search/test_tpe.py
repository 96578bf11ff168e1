"""TPE on arrays suggests what Optuna's own TPE suggests."""

from __future__ import annotations

import random

import optuna
import pytest

from sweeps.ledger.ledger import Suggestion
from sweeps.ledger.warm_start import PriorTrial, WarmStart
from sweeps.search import samplers
from sweeps.search.shown_trials import SPACE
from sweeps.search.suggest import Suggester
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.unit.sweeps.search.trial_history import empty_ledger

SPEC = """
name: s
task: digits
metric: {metric}
mode: {mode}
trials: 500
budget: {{epochs: 9}}
space: {space}
search: {{sampler: tpe, startup_trials: 5, arguments: {arguments}}}
early_stopping: {rule}
"""
ONE, SEVERAL = ("val/loss", "min"), ("[val/loss, val/accuracy]", "[min, max]")
THREE = ("[val/loss, val/accuracy, cost]", "[min, max, min]")
FLOATS = "{task.x: {uniform: [0, 1]}, task.y: {loguniform: [1.0e-4, 1]}}"
MIXED = (
    "{task.x: {uniform: [0, 1]}, task.k: {int: [1, 300]}, task.l: {logint: [1, 300]}, "
    "task.q: {quniform: [0, 1, 0.1]}, task.c: {choice: [a, b, c]}, task.b: {choice: [1, 2]}}"
)
CHOICES = "{task.c: {choice: [a, b, c]}, task.b: {choice: [1, 2, 3, 4, 5, 6, 7, 8, 9]}}"
CONDITIONAL = (
    "{task.c: {choice: [a, b, c]}, task.x: {uniform: [0, 1], when: {task.c: a}}, "
    "task.y: {loguniform: [1.0e-4, 1], when: {task.c: b}}, task.k: {int: [1, 9]}}"
)
PRIORS = "{task.x: {uniform: [0, 1], prior: 0.3}, task.y: {uniform: [0, 1]}}"
NINE = "{" + ", ".join(f"task.x{index}: {{uniform: [0, 1]}}" for index in range(9)) + "}"
ASHA, PAUSING = "{scheduler: asha}", "{scheduler: asha_promote, grace_epochs: 1, reduction: 3}"


def _spec(
    metrics: tuple[str, str] = ONE,
    space: str = FLOATS,
    arguments: str = "{}",
    rule: str = "{scheduler: none}",
) -> SweepSpec:
    metric, mode = metrics
    text = SPEC.format(metric=metric, mode=mode, space=space, arguments=arguments, rule=rule)
    return parse_spec(text, "s.yaml")


class History:
    """Trials that end at random: complete, stopped, failed or still running. Values repeat."""

    def __init__(self, spec: SweepSpec) -> None:
        self.ledger = empty_ledger(spec)
        self._draw, self._num_metrics = random.Random(0), len(spec.metrics)

    def go_on(self) -> None:
        """Change some of the running trials: one trains on, ends or fails."""
        for trial in self.ledger.trials():
            if not trial.finished and self._draw.random() < 0.3:
                self._train(trial.number, self._draw.choice([1, 3]))

    def _train(self, number: int, last: int) -> None:
        for epoch in range(1, last + 1):
            value, *others = (round(self._draw.random(), 2) for _ in range(self._num_metrics))
            self.ledger.report(number, epoch=epoch, step=epoch, value=value, others=others)
        endings = (None, "pruned", "complete", "failed")
        (ending,) = self._draw.choices(endings, [1, 2, 3, 1])
        if ending is not None:
            reason = "non_finite: nan" if ending == "failed" else None
            self.ledger.finish(number, ending, reason=reason)  # type: ignore[arg-type]


CASES = {
    "one metric": _spec(),
    "more is better": _spec(("val/loss", "max")),
    "parameters with steps": _spec(space=MIXED),
    "choices": _spec(space=CHOICES),
    "nine parameters": _spec(space=NINE),
    "conditional": _spec(space=CONDITIONAL),
    "independent": _spec(space=MIXED, arguments="{multivariate: false}"),
    "without liar": _spec(arguments="{constant_liar: false, n_ei_candidates: 7}"),
    "priors": _spec(space=PRIORS),
    "stopped": _spec(rule=ASHA),
    "paused": _spec(rule=PAUSING),
    "two metrics": _spec(SEVERAL),
    "two metrics, mixed": _spec(SEVERAL, MIXED),
    "two metrics, conditional": _spec(SEVERAL, CONDITIONAL, "{multivariate: false}"),
    "two metrics, joint": _spec(SEVERAL, arguments="{multivariate: true}"),
    "two metrics, paused": _spec(SEVERAL, rule=PAUSING),
    "three metrics": _spec(THREE),
}


@pytest.mark.parametrize("spec", CASES.values(), ids=list(CASES))
def test_suggestions_are_those_of_optuna(spec: SweepSpec, monkeypatch) -> None:
    """What is kept of the trials between two suggestions follows their changes."""
    # With three metrics, only the choice among the trials of a front is another one.
    monkeypatch.setattr("sweeps.optuna_compat.tpe._MOST_METRICS", 3)
    history, space = History(spec), spec.search_space()
    drawn = {key: one.to_optuna() for key, one in space.ordered()}
    for number in range(60):
        params = space.draw(number)
        assert params is not None
        point = {key: drawn[key] for key in params}
        history.ledger.add(Suggestion(params, point, {SPACE: space.digest()}))
        history.go_on()
    kept = Suggester(spec, history.ledger)
    for number in range(60, 75):
        suggestion = kept.propose(number)
        with monkeypatch.context() as patched:
            patched.setitem(samplers._CLASSES, "tpe", optuna.samplers.TPESampler)
            assert Suggester(spec, history.ledger).propose(number) == suggestion
        history.ledger.add(suggestion)
        history.go_on()
    assert len({trial.state for trial in history.ledger.frozen_trials()}) == 4


def test_suggestions_are_those_of_optuna_with_trials_of_earlier_sweeps(monkeypatch) -> None:
    spec = _spec()
    ledger, draw = empty_ledger(spec), random.Random(0)
    points = ({"task.x": draw.random(), "task.y": draw.random()} for _ in range(20))
    earlier = [PriorTrial(one, one["task.x"], 9, True) for one in points]
    ledger.store_warm_start(WarmStart(earlier))
    suggestion = Suggester(spec, ledger).propose(0)
    monkeypatch.setitem(samplers._CLASSES, "tpe", optuna.samplers.TPESampler)
    assert Suggester(spec, ledger).propose(0) == suggestion
