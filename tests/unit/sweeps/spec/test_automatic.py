"""What `auto` takes as sampler and as stopping rule, and that it is decided once."""

from __future__ import annotations

import pytest

from sweeps.errors import SpecError
from sweeps.spec.automatic import sentence
from sweeps.spec.spec import SweepSpec, parse_spec, parse_with_positions

HEAD = """
name: s
task: digits
metric: val/loss
mode: min
trials: 24
budget: {epochs: 9}
space: {train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}}
"""
AUTO = "search: auto\nearly_stopping: auto\n"
LR, NORM = "train.optimizer.lr", "train.clip.max_norm"
SMALL, LARGE = ("random", "asha_promote"), ("tpe", "asha_promote")
FORBIDDEN = (f"space={{{LR}: {{choice: [1, 2, 3, 4]}}, {NORM}: {{choice: [1, 2, 3, 4]}}}}",)


def _taken(more: str, *overrides: str) -> tuple[str, str]:
    spec = parse_spec(HEAD + more, "s.yaml", overrides)
    return spec.search.sampler, spec.early_stopping.scheduler


@pytest.mark.parametrize(
    ("overrides", "taken"),
    [
        ((), ("tpe", "asha_promote")),
        (("trials=11",), ("tpe", "asha_promote")),
        (("trials=10",), ("random", "asha_promote")),
        (("trials=10", "search.startup_trials=4"), ("tpe", "asha_promote")),
        (("trials=10", "search.arguments={multivariate: true}"), ("tpe", "asha_promote")),
        (("trials=10", "search.warm_start=earlier"), ("tpe", "asha_promote")),
        (("trials=1",), ("random", "none")),
        ((f"space={{{LR}: {{choice: [0.1, 0.2]}}}}",), ("random", "asha_promote")),
        ((f"space={{{LR}: {{choice: [0.1]}}}}",), ("random", "none")),
        ((f"space={{{LR}: {{choice: [1, 2]}}, {NORM}: {{choice: [1, 2, 3, 4, 5]}}}}",), SMALL),
        ((f"space={{{LR}: {{choice: [1, 2]}}, {NORM}: {{choice: [1, 2, 3, 4, 5, 6]}}}}",), LARGE),
        ((*FORBIDDEN, f"search.constraints=[{LR} <= {NORM}]"), SMALL),
        (FORBIDDEN, LARGE),
        ((*FORBIDDEN, f"search.constraints=[{LR} <= {NORM}]", "search.startup_trials=0"), LARGE),
        (("space={}",), LARGE),
        (("budget.epochs=1",), ("tpe", "none")),
        (("budget.epochs=2",), ("tpe", "asha_promote")),
        (("budget.epochs=2", "early_stopping.grace_epochs=1"), ("tpe", "asha_promote")),
        (("early_stopping.grace_epochs=8",), ("tpe", "none")),  # in the last fifth
        (("early_stopping.scheduler=asha",), ("tpe", "asha")),
        (("early_stopping.scheduler=pbt",), ("random", "pbt")),
        (("search.sampler=gp",), ("gp", "asha_promote")),
        (("metric=[val/loss, val/accuracy]", "mode=[min, max]"), ("tpe", "asha_promote")),
    ],
    ids=" ".join,
)
def test_what_auto_takes(overrides: tuple[str, ...], taken: tuple[str, str]) -> None:
    assert _taken(AUTO, *overrides) == taken
    long = "search: {sampler: auto}\nearly_stopping: {scheduler: auto}\n"
    assert _taken(long, *overrides) == taken


def test_reasons_are_said() -> None:
    line = sentence(parse_with_positions(HEAD + AUTO, "s.yaml")[1].choices)
    assert line.startswith("auto takes sampler tpe, as it found better values than random search;")
    assert "; scheduler asha_promote, as with tpe and with gp it has the best mean ranks" in line
    few = parse_with_positions(HEAD + AUTO, "s.yaml", ["trials=4", "budget.epochs=1"])[1]
    assert [choice.why for choice in few.choices] == [
        "as tpe would draw all 4 trials at random, too (startup_trials: 10)",
        "as a budget of 1 has no report so early that stopping saves anything",
    ]


def test_auto_passes_on_the_parameters_beside_it() -> None:
    more = "early_stopping: {scheduler: auto, reduction: 2, grace_epochs: 2, patience: 3}\n"
    spec = parse_spec(HEAD + more, "s.yaml")
    rule = spec.early_stopping.rule.model_dump()
    assert (spec.early_stopping.scheduler, rule) == (
        "asha_promote",
        {"grace_epochs": 2, "reduction": 2},
    )
    assert spec.early_stopping.patience == 3


@pytest.mark.parametrize("overrides", [(), ("search=auto", "early_stopping=auto")])
def test_stored_spec_names_what_was_taken(overrides: tuple[str, ...]) -> None:
    spec, document = parse_with_positions(
        HEAD + ("" if overrides else AUTO), "s.yaml", [*overrides, "trials=10"]
    )
    line = sentence(document.choices)
    assert "sampler random" in line
    assert "scheduler asha_promote" in line
    assert "auto" not in spec.model_dump(mode="json")["search"].values()
    again, stored = parse_with_positions(spec.to_yaml(), "sweep.yaml", ["trials=40"])
    assert (again.search, again.early_stopping) == (spec.search, spec.early_stopping)
    assert stored.choices == []


def test_model_of_a_spec_never_has_auto() -> None:
    data = parse_spec(HEAD, "s.yaml").model_dump(mode="json") | {"early_stopping": "auto"}
    spec = SweepSpec.model_validate(data)
    assert spec.early_stopping.scheduler == "asha_promote"
    assert data["early_stopping"] == "auto"  # the caller's own


def test_files_without_auto_take_nothing() -> None:
    spec, document = parse_with_positions(HEAD, "s.yaml")
    assert document.choices == []
    assert (spec.search.sampler, spec.early_stopping.scheduler) == ("tpe", "none")


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ("early_stopping: {scheduler: auto, grace_epochs: 9}\n", "early_stopping.grace_epochs"),
        ("early_stopping: {scheduler: auto, reduction: 1}\n", "early_stopping.reduction"),
        ("early_stopping: {scheduler: auto, reductoin: 2}\n", "early_stopping.reductoin"),
        ("early_stopping: automatic\n", "early_stopping"),
        ("search: [auto]\n", "search"),
        ("search: {sampler: automatic}\n", "search.sampler"),
        ("search: auto\nbudget: {epochs: 0}\n", "budget.epochs"),
        ("search: auto\ntrials: many\n", "trials"),
    ],
)
def test_values_beside_auto_are_checked(more: str, key: str) -> None:
    kept = [
        one
        for one in HEAD.splitlines()
        if one.split(":")[0] != more.splitlines()[-1].split(":")[0]
    ]
    with pytest.raises(SpecError) as refused:
        parse_spec("\n".join(kept) + "\n" + more, "s.yaml")
    assert [one.key for one in refused.value.problems] == [key]
