"""Suggested parameters: initial points, conditions, constraints, and edited spaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from typer.testing import CliRunner

from sweeps.cli.app import app
from sweeps.errors import SpecError
from sweeps.ledger.ledger import Ledger, Suggestion
from sweeps.search.shown_trials import ShownTrials
from sweeps.search.suggest import Suggester
from sweeps.spec.resume_checks import check_search_changes
from sweeps.spec.revisions import read_revisions, read_spec, write_spec
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.slices import samplers
from tests.specs import with_overrides
from tests.unit.sweeps.search.serial_search import Params, end, ledger_at, search, spec_of
from tests.unit.sweeps.sweep_factory import MadeSweep

RATE, NORM, NAME = "train.optimizer.lr", "train.clip.max_norm", "train.optimizer.name"
LEARNING = ("tpe", "gp", "cmaes", "nsgaii")
CONDITIONAL = (
    "space={train.optimizer.name: {choice: [sgd, adamw, lion]}, "
    "train.optimizer.momentum: {uniform: [0.8, 0.99], when: {train.optimizer.name: sgd}}, "
    "train.optimizer.nesterov: {choice: [true, false], when: {train.optimizer.name: sgd}}, "
    "task.warm: {choice: [a, b], when: {train.optimizer.name: [adamw, lion]}}, "
    "task.deep: {int: [1, 9], when: {task.warm: b}}, "
    "train.optimizer.lr: {loguniform: [1e-4, 1e-1]}, train.clip.max_norm: {uniform: [0.1, 10]}}"
)


# Points to begin with


@pytest.mark.parametrize("sampler", samplers("tpe", "qmc", "cmaes"))
def test_initial_points_come_first_then_the_sampler(tmp_path: Path, sampler: str) -> None:
    points = "[{train.optimizer.lr: 0.01, train.clip.max_norm: 5}, {train.clip.max_norm: 0.5}]"
    spec = spec_of(
        f"search.try_first={points}", f"search.sampler={sampler}", "search.startup_trials=3"
    )
    once = search(tmp_path / "once.db", spec)
    assert once[0] == {RATE: 0.01, NORM: 5.0}
    assert isinstance(once[0][NORM], float)
    assert once[1][NORM] == 0.5
    assert spec.space[RATE].contains(once[1][RATE])
    assert 0.5 not in [params[NORM] for params in once[2:]], "each point is tried once"
    assert search(tmp_path / "died.db", spec, deaths=[0, 1, 2, 6]) == once


@pytest.mark.parametrize("sampler", samplers(*LEARNING, "qmc", "grid"))
def test_initial_points_may_have_lists_and_mappings(tmp_path: Path, sampler: str) -> None:
    options = "[[64, 64], [128], {wide: 9}, none]"
    points = "[{task.layers: [128]}, {task.layers: {wide: 9}, task.n: 2}]"
    spec = spec_of(
        f"space={{task.layers: {{choice: {options}}}, task.n: {{int: [1, 2]}}}}", "trials=8",
        f"search.try_first={points}", f"search.sampler={sampler}", "search.startup_trials=3",
    )  # fmt: skip
    found = search(tmp_path / "l.db", spec)
    configs = [spec.trial_config(n, params).task.arguments for n, params in enumerate(found)]
    assert configs[0]["layers"] == [128]
    assert configs[1] == {"layers": {"wide": 9}, "n": 2}
    assert len({str(one) for one in configs}) == 8, "each point is tried once"
    check_search_changes(spec, with_overrides(spec, ["trials=9"]), 8)


# Conditions


def _check_existence(params: Params) -> None:
    sgd = params[NAME] == "sgd"
    assert ("train.optimizer.momentum" in params) is sgd
    assert ("train.optimizer.nesterov" in params) is sgd
    assert ("task.warm" in params) is not sgd
    assert ("task.deep" in params) is (params.get("task.warm") == "b")
    assert RATE in params


@pytest.mark.parametrize("sampler", samplers(*LEARNING, "qmc"))
def test_trials_have_the_active_parameters(tmp_path: Path, sampler: str) -> None:
    trials = 12 if sampler != "gp" else 8
    spec = spec_of(CONDITIONAL, f"search.sampler={sampler}", "search.startup_trials=4",
                   f"trials={trials}")  # fmt: skip
    once = search(tmp_path / "once.db", spec)
    for number, params in enumerate(once):
        _check_existence(params)
        spec.trial_config(number, params)
    assert len({params[NAME] for params in once}) > 1
    assert search(tmp_path / "died.db", spec, deaths=[1, 5, 6]) == once


@pytest.mark.parametrize("sampler", samplers(*LEARNING, "qmc", "random"))
def test_conditional_parameters_are_sampled_per_trial(tmp_path: Path, sampler: str) -> None:
    spec = spec_of(
        "space={task.a: {choice: [x, y]}, task.b: {uniform: [0, 1], when: {task.a: x}}, "
        "task.c: {uniform: [0, 1], when: {task.a: y}}, task.n: {int: [1, 100]}}",
        f"search.sampler={sampler}", "search.startup_trials=20", "trials=12",
    )  # fmt: skip
    drawn = [one.get("task.b", one.get("task.c")) for one in search(tmp_path / "l.db", spec)]
    assert len(set(drawn)) == 12


def test_cmaes_models_parameters_of_every_trial(tmp_path: Path) -> None:
    """It would give up for good if a parameter of its first generation were missing later."""
    first = ", ".join(["{train.optimizer.name: sgd}"] * 6)
    spec = spec_of(
        CONDITIONAL, "search.sampler=cmaes", "search.startup_trials=2", "trials=16",
        f"search.try_first=[{first}]",
    )  # fmt: skip
    search(tmp_path / "l.db", spec)
    attrs = [trial.system_attrs for trial in ledger_at(tmp_path / "l.db").frozen_trials()]
    assert all("cma:generation" in one for one in attrs[2:])
    assert attrs[-1]["cma:generation"] > 0


# Constraints

TOGETHER = (
    "space={train.batch_size: {choice: [32, 64, 128]}, train.accumulation: {choice: [1, 2, 4]}, "
    "train.optimizer.lr: {loguniform: [1e-4, 1e-1]}, train.clip.max_norm: {uniform: [0.1, 10]}}"
)


@pytest.mark.parametrize("sampler", samplers(*LEARNING, "qmc"))
def test_no_trial_violates_a_constraint(tmp_path: Path, sampler: str) -> None:
    trials = 12 if sampler != "gp" else 7
    spec = spec_of(
        TOGETHER, f"search.sampler={sampler}", "search.startup_trials=4", f"trials={trials}",
        "search.constraints=['train.batch_size / train.accumulation <= 32', "
        "'train.clip.max_norm < 3 + train.optimizer.lr']",
    )  # fmt: skip
    once = search(tmp_path / "once.db", spec)
    for params in once:
        assert params["train.batch_size"] / params["train.accumulation"] <= 32
        assert params[NORM] < 3 + params[RATE]
    assert search(tmp_path / "died.db", spec, deaths=[0, 5, 6]) == once


@pytest.mark.parametrize("sampler", samplers("tpe", "gp"))
def test_sampler_stuck_on_forbidden_points_is_overruled(tmp_path: Path, sampler: str) -> None:
    """The best norm is 5; what is allowed is a hundredth of the space, far from it."""
    spec = spec_of(
        f"search.sampler={sampler}", "search.startup_trials=2", "trials=6",
        "search.constraints=['train.clip.max_norm > 9.9']",
    )  # fmt: skip
    once = search(tmp_path / "once.db", spec)
    assert all(params[NORM] > 9.9 for params in once)
    assert len({params[NORM] for params in once}) == 6


@pytest.mark.parametrize("sampler", samplers(*LEARNING, "qmc"))
def test_steps_are_round_decimal_numbers(tmp_path: Path, sampler: str) -> None:
    """Three times 0.1 is not 0.3 in binary: such a value would violate `<= 0.3`."""
    spec = spec_of(
        "space={task.a: {quniform: [0.1, 0.5, 0.1]}, task.b: {quniform: [0.1, 0.5, 0.1]}}",
        "search.constraints=['task.a <= 0.3']", f"search.sampler={sampler}",
        "search.startup_trials=6", "trials=12",
    )  # fmt: skip
    found = search(tmp_path / "l.db", spec)
    assert {params["task.b"] for params in found} <= {0.1, 0.2, 0.3, 0.4, 0.5}
    assert 0.3 in [params["task.a"] for params in found]


def test_trial_on_last_step_of_edited_space_counts(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "l.db")
    steps = FloatDistribution(0.1, 0.5, step=0.1)
    ledger.add(Suggestion({"task.a": 0.1 + 2 * 0.1}, {"task.a": steps}, {"notes": "of cmaes"}))
    end(ledger, 0)
    (drawn,) = ledger.frozen_trials()
    same = ShownTrials(spec_of("space={task.a: {quniform: [0.1, 0.5, 0.1]}}"), ledger).as_point(
        drawn
    )
    assert (same.params, same.system_attrs) == ({"task.a": 0.3}, {"notes": "of cmaes"})
    for narrower in ("{quniform: [0.1, 0.3, 0.1]}", "{quniform: [0.1, 0.7, 0.2]}"):
        assert _shown(ledger, spec_of(f"space={{task.a: {narrower}}}")) == [{"task.a": 0.3}]


# A space that is edited between two drivers


def _edited(*overrides: str, sampler: str) -> SweepSpec:
    return spec_of(*overrides, f"search.sampler={sampler}", "search.startup_trials=3", "trials=12")


NARROWER = "space.train.optimizer.lr={loguniform: [1e-3, 1e-1]}"
OTHER_KIND = "space.train.optimizer.lr={uniform: [1e-3, 1e-1]}"
A_CHOICE = "space.train.optimizer.lr={choice: [0.001, 0.01]}"
ONE_MORE = "space.train.accumulation={choice: [1, 2, 4]}"
OTHER_KEYS = "space={train.clip.max_norm: {uniform: [0.1, 10]}, task.x: {uniform: [0, 0.3]}}"


@pytest.mark.parametrize(
    ("sampler", "change"),
    [
        ("tpe", NARROWER),
        ("tpe", OTHER_KIND),
        ("tpe", A_CHOICE),
        ("tpe", OTHER_KEYS),
        pytest.param("gp", ONE_MORE, marks=pytest.mark.chaos),
        ("cmaes", NARROWER),
        ("cmaes", OTHER_KEYS),
        pytest.param("nsgaii", A_CHOICE, marks=pytest.mark.chaos),
    ],
)
def test_sweep_resumes_in_an_edited_space(tmp_path: Path, sampler: str, change: str) -> None:
    before = search(tmp_path / "l.db", spec_of(f"search.sampler={sampler}", "trials=6",
                                               "search.startup_trials=3"))  # fmt: skip
    after = _edited(change, sampler=sampler)
    (tmp_path / "died.db").write_bytes((tmp_path / "l.db").read_bytes())
    whole = search(tmp_path / "l.db", after)
    assert whole[:6] == before, "old trials stay"
    for params in whole[6:]:
        assert params.keys() == after.space.keys()
        assert all(after.space[key].contains(value) for key, value in params.items())
    assert search(tmp_path / "died.db", after, deaths=[6, 8]) == whole


def _shown(ledger: Ledger, spec: SweepSpec) -> list[Params | None]:
    """What a sampler sees of the trials; None where it sees one that failed."""
    trials = ShownTrials(spec, ledger)
    shown = [trials.as_point(trial) for trial in ledger.frozen_trials()]
    for trial in shown:
        assert trial.params.keys() == trial.distributions.keys()
    return [trial.params if trial.state.name != "FAIL" else None for trial in shown]


def test_old_trials_count_inside_the_new_space(tmp_path: Path) -> None:
    points = (
        "[{train.optimizer.lr: 0.0002}, {train.optimizer.lr: 0.02}, {train.optimizer.lr: 0.1}]"
    )
    old = search(tmp_path / "l.db", spec_of(f"search.try_first={points}", "trials=3"))
    ledger = ledger_at(tmp_path / "l.db")
    assert _shown(ledger, spec_of()) == old
    narrow = spec_of("space.train.optimizer.lr={uniform: [0.01, 0.1]}")
    assert _shown(ledger, narrow) == [None, old[1], old[2]]
    strict = spec_of("search.constraints=['train.optimizer.lr < 0.05']")
    assert _shown(ledger, strict) == [old[0], old[1], None]
    # With the value that they were trained with.
    more = spec_of("space.train.accumulation={choice: [1, 2]}")
    assert _shown(ledger, more) == [{**params, "train.accumulation": 1} for params in old]
    other = spec_of("space.train.accumulation={choice: [2, 4]}")
    assert _shown(ledger, other) == [None, None, None]
    less = spec_of("space={train.optimizer.lr: {loguniform: [1e-4, 1e-1]}}")
    assert _shown(ledger, less) == [{RATE: params[RATE]} for params in old]


@pytest.mark.parametrize(
    "narrower",
    [
        "space.train.optimizer.lr={loguniform: [1e-4, 1e-2]}",
        "space={train.clip.max_norm: {uniform: [0.1, 10]}}",
        "search.constraints=['train.optimizer.lr < 0.01']",
    ],
)
def test_tried_point_does_not_prevent_narrowing(tmp_path: Path, narrower: str) -> None:
    before = spec_of("search.try_first=[{train.optimizer.lr: 0.05}]", "trials=2")
    old = search(tmp_path / "l.db", before)
    write_spec(tmp_path / "sweep.yaml", before)
    text = read_spec(tmp_path / "sweep.yaml").text
    with pytest.raises(SpecError, match=r"search\.try_first\[0\]"):
        parse_spec(text, "sweep.yaml", [narrower], drawn=0)
    after = parse_spec(text, "sweep.yaml", [narrower, "trials=6"], drawn=1)
    check_search_changes(before, after, 1)
    write_spec(tmp_path / "sweep.yaml", after)
    assert read_spec(tmp_path / "sweep.yaml").spec == after
    assert read_revisions(tmp_path / "sweep.yaml") == [before, after]
    found = search(tmp_path / "l.db", after)
    assert found[:2] == old
    assert all(params.get(RATE, 0) <= 0.01 for params in found[2:])
    # Nobody had begun with it when the space was narrowed.
    again = Suggester(after, ledger_at(tmp_path / "l.db")).propose(0, old[0])
    assert again.params.get(RATE, 0) <= 0.01


def test_resume_knows_which_points_were_tried(tmp_path: Path) -> None:
    points = "[{train.optimizer.lr: 0.05}, {train.optimizer.lr: 0.02}]"
    made = MadeSweep(tmp_path, more=f"search: {{try_first: {points}}}")
    made.add("complete", 0.5)
    for high, told in (("0.03", "No module named 'nowhere'"), ("0.01", "search.try_first[1]")):
        narrower = f"space.train.optimizer.lr={{uniform: [0.001, {high}]}}"
        options = ["--root", str(tmp_path), "-s", "search.sampler=nowhere:X", "-s", narrower]
        done = CliRunner().invoke(app, ["resume", "small", *options])
        assert (done.exit_code, told in done.output) == (2, True), done.output
        assert "try_first[0]" not in done.output


def test_sampler_attributes_are_hidden_in_another_space(tmp_path: Path) -> None:
    """CMA-ES keeps its state in coordinates of the space."""
    spec = spec_of("search.sampler=cmaes", "search.startup_trials=2", "trials=4")
    search(tmp_path / "l.db", spec)
    ledger = ledger_at(tmp_path / "l.db")
    wider = spec_of("search.sampler=cmaes", "space.train.optimizer.lr={loguniform: [1e-4, 1]}")
    noted, hidden = (
        [
            bool(ShownTrials(one, ledger).as_point(trial).system_attrs)
            for trial in ledger.frozen_trials()
        ]
        for one in (spec, wider)
    )
    assert (all(noted), any(hidden)) == (True, False)


def test_unstarted_trial_gets_added_parameters(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "l.db")
    before = ledger.add(Suggester(spec_of(), ledger).propose(0)).params
    more = spec_of("space.train.accumulation={choice: [1, 2]}")
    completed = ledger.complete(0, Suggester(more, ledger).propose(0, before)).params
    assert completed.keys() == more.space.keys()
    assert {key: completed[key] for key in before} == before
    # What it has is kept, also where the space has moved on.
    other = spec_of(
        f"space.{RATE}={{choice: [1, 2]}}", "space.task.x={int: [1, 9]}",
        "search.constraints=['train.clip.max_norm > 9.9']",
    )  # fmt: skip
    completed = ledger.complete(0, Suggester(other, ledger).propose(0, before)).params
    assert {key: completed[key] for key in before} == before
    assert completed["task.x"] in range(1, 10)
