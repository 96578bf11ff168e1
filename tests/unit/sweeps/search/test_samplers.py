"""Samplers by name and by class: suggestions depend on the ledger alone."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from sweeps.search.dry_run import dry_run
from sweeps.search.samplers import KERNEL, SamplerRejected, check_sampler
from sweeps.search.suggest import Suggester
from tests.slices import samplers, sliced
from tests.unit.sweeps.search.serial_search import end, ledger_at, search, spec_of

GRID = (
    "search.sampler=grid",
    "space={train.optimizer.name: {choice: [sgd, adamw]}, train.accumulation: {choice: [1, 2]}, "
    "train.clip.max_norm: {quniform: [0.1, 0.3, 0.1]}}",
)
OWN = """
from optuna.samplers import RandomSampler


class Mine(RandomSampler):
    def __init__(self, shift=0, seed=None):
        super().__init__(seed=seed + shift)


class Noting(RandomSampler):
    def before_trial(self, study, trial):
        past = [one.system_attrs["mine"] for one in study.get_trials() if one.state.is_finished()]
        study._storage.set_trial_system_attr(trial._trial_id, "mine", max(past, default=0) + 1)


class Unseeded(RandomSampler):
    def __init__(self):
        super().__init__(seed=7)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's, beside where the command is typed."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_nsgaii_generation_has_size_of_startup_trials(tmp_path: Path) -> None:
    spec = spec_of("search.sampler=nsgaii", "search.startup_trials=4", "trials=14")
    search(tmp_path / "l.db", spec)
    noted = [trial.system_attrs for trial in ledger_at(tmp_path / "l.db").frozen_trials()]
    assert [attrs["NSGAIISampler:generation"] for attrs in noted] == [0] * 4 + [1] * 4 + [
        2
    ] * 4 + [3] * 2


def test_nsgaii_generation_ends_when_its_trials_complete(
    tmp_path: Path,
) -> None:
    ledger = ledger_at(tmp_path / "l.db")
    proposer = Suggester(spec_of("search.sampler=nsgaii", "search.startup_trials=4"), ledger)
    found: list[int] = []
    for ended in (*[None] * 6, "complete", "failed", "complete", "pruned", "complete", "complete"):
        number = len(found)
        if ended is not None:
            end(ledger, number - 6, ended)
        proposal = proposer.propose(number)
        ledger.add(proposal)
        found.append(proposal.system_attrs["NSGAIISampler:generation"])
    assert found == [0] * 11 + [1]


def test_grid_tries_every_point_once_in_order(tmp_path: Path) -> None:
    spec = spec_of(*GRID, "trials=12")
    wanted = [
        {"train.optimizer.name": name, "train.accumulation": acc, "train.clip.max_norm": norm}
        for name, acc, norm in itertools.product(["sgd", "adamw"], [1, 2], [0.1, 0.2, 0.3])
    ]
    assert search(tmp_path / "l.db", spec, deaths=[3, 7]) == wanted


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(
            "task.a: {choice: [1, 2]}, task.b: {choice: [x, y]}",
            "task.a: {choice: [1, 2]}, task.b: {choice: [x, y, z]}",
            id="a value more",
        ),
        pytest.param(
            "task.a: {choice: [1, 2]}, train.accumulation: {choice: [1, 2]}",
            "task.a: {choice: [1, 2]}, train.accumulation: {choice: [1, 2]}, "
            "train.compile: {choice: [false, true]}",
            id="a key more",
        ),
        pytest.param(
            "task.a: {choice: [1, 2]}, task.b: {choice: [x, y]}",
            "task.b: {choice: [x, y]}, task.a: {choice: [2, 1, 3]}",
            id="another order",
        ),
    ],
)
def test_edited_grid_tries_only_new_points(tmp_path: Path, before: str, after: str) -> None:
    grid = ("search.sampler=grid", "trials=4")
    search(tmp_path / "l.db", spec_of(*grid, f"space={{{before}}}"))
    edited = spec_of("search.sampler=grid", f"space={{{after}}}", "trials=4")
    points = list(edited.search_space().grid())
    whole = spec_of("search.sampler=grid", f"space={{{after}}}", f"trials={len(points)}")
    found = search(tmp_path / "l.db", whole, deaths=[4, 5])
    fixed = {"train.compile": False} if "train.compile" in after else {}
    found = [{**fixed, **params} for params in found]
    assert found[4:] == [point for point in points if point not in found[:4]]


def test_grid_skips_points_already_sampled(tmp_path: Path) -> None:
    space = "space={task.a: {quniform: [0.1, 0.7, 0.1]}, task.b: {int: [1, 2]}}"
    before = search(tmp_path / "l.db", spec_of("search.sampler=random", space, "trials=8"))
    tried = {(round(one["task.a"], 3), one["task.b"]) for one in before}
    after = search(tmp_path / "l.db", spec_of("search.sampler=grid", space, "trials=14"))
    wanted = itertools.product([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7], [1, 2])
    assert [tuple(one.values()) for one in after[8:]] == [
        point for point in wanted if point not in tried
    ][:6]


def test_grid_skips_inactive_and_forbidden_points(tmp_path: Path) -> None:
    spec = spec_of(
        "search.sampler=grid",
        "space={task.a: {choice: [x, y]}, task.n: {int: [1, 3], when: {task.a: y}}, "
        "task.m: {int: [1, 2]}}",
        "search.constraints=['task.m < task.n']",
        "trials=5",
    )
    assert search(tmp_path / "l.db", spec) == [
        {"task.a": "x", "task.m": 1},
        {"task.a": "x", "task.m": 2},
        {"task.a": "y", "task.n": 2, "task.m": 1},
        {"task.a": "y", "task.n": 3, "task.m": 1},
        {"task.a": "y", "task.n": 3, "task.m": 2},
    ]


def test_grid_tries_no_initial_point_again(tmp_path: Path) -> None:
    point = "search.try_first=[{train.optimizer.name: adamw, train.accumulation: 2}]"
    plain = search(tmp_path / "plain.db", spec_of(*GRID, "trials=12"))
    tried = search(tmp_path / "first.db", spec_of(*GRID, "trials=12", point))
    assert tried[1:] == [one for one in plain if one != tried[0]]
    assert (tried[0]["train.optimizer.name"], tried[0]["train.accumulation"]) == ("adamw", 2)


@pytest.mark.parametrize(
    ("sampler", "ended"),
    sliced(
        [*itertools.product(("tpe", "gp", "cmaes"), ("complete", "pruned", "failed"))],
        [("tpe", "complete"), ("tpe", "pruned"), ("cmaes", "failed")].__contains__,
    ),
)
def test_startup_trials_have_results_before_model_suggests(
    tmp_path: Path, sampler: str, ended: str
) -> None:
    """Trials at the same time: until four have ended, the points are chance's."""
    spec = spec_of(f"search.sampler={sampler}", "search.startup_trials=4")
    ledger = ledger_at(tmp_path / "l.db")
    proposer, chance = (Suggester(one, ledger) for one in (spec, spec_of("search.sampler=random")))

    def is_random() -> bool:
        number = len(ledger.trials())
        drawn = chance.propose(number).params
        return ledger.add(proposer.propose(number)).params == drawn

    assert [is_random() for _ in range(7)] == [True] * 7, "none has ended"
    for number in range(3):
        end(ledger, number)
    assert is_random(), "three have ended"
    end(ledger, 3, ended)
    # One that failed has no result; what was stopped has one for tpe alone.
    counts = ended == "complete" or (ended == "pruned" and sampler == "tpe")
    assert is_random() is not counts
    end(ledger, 4)
    assert not is_random(), "four are complete, and tpe has seen one more"


@pytest.mark.chaos
@pytest.mark.parametrize("sampler", ["gp", "optuna.samplers:GPSampler"])
def test_gp_refits_from_its_last_fit(tmp_path: Path, sampler: str) -> None:
    spec = spec_of(f"search.sampler={sampler}", "search.startup_trials=3", "trials=9")
    search(tmp_path / "l.db", spec, deaths=[5])
    trials = ledger_at(tmp_path / "l.db").frozen_trials()
    study = optuna.create_study(
        sampler=optuna.samplers.GPSampler(
            seed=0, n_startup_trials=3, warn_independent_sampling=False
        )
    )
    for trial in trials:
        ours = trial.system_attrs.get(KERNEL, [])
        if trial.number % 2 == 1:  # a suggestion of TPE
            assert not ours
            study.add_trial(trial)
            continue
        asked = study.ask(dict(trial.distributions))
        fits = study.sampler._gprs_cache_list or []  # type: ignore[attr-defined]
        assert len(ours) == len(fits) == (trial.number >= 3)
        for values, fit in zip(ours, fits, strict=True):
            assert values[:-2] == fit.inverse_squared_lengthscales.tolist()
            assert values[-2:] == [fit.kernel_scale.item(), fit.noise_var.item()]
        study.tell(asked.number, state=TrialState.FAIL)  # which it leaves out
        study.add_trial(trial)


@pytest.mark.parametrize(
    "name",
    sliced(
        ["TPESampler", "NSGAIIISampler", "BruteForceSampler", "QMCSampler", "CmaEsSampler"],
        "TPESampler".__eq__,
    ),
)
def test_any_optuna_sampler_can_be_named(tmp_path: Path, name: str) -> None:
    more = ["search.arguments={multivariate: false}"] if name == "TPESampler" else []
    if name == "BruteForceSampler":
        more.append("space={train.accumulation: {choice: [1, 2, 4]}, task.x: {choice: [32, 64]}}")
    spec = spec_of(f"search.sampler=optuna.samplers:{name}", "trials=6", *more)
    dry_run(spec)
    once = search(tmp_path / "once.db", spec)
    assert search(tmp_path / "died.db", spec, deaths=[2, 5]) == once
    assert len({str(params) for params in once}) == 6


def test_custom_sampler_class_gets_seed_and_arguments(tmp_path: Path, own_module: str) -> None:
    spec = spec_of(f"search.sampler={own_module}:Mine", "trials=3")
    assert search(tmp_path / "a.db", spec) == search(
        tmp_path / "b.db", spec_of("search.sampler=random", "trials=3")
    )
    shifted = spec_of(
        f"search.sampler={own_module}:Mine", "search.arguments={shift: 1}", "trials=3"
    )
    assert search(tmp_path / "c.db", shifted) != search(tmp_path / "a.db", spec)
    spec = spec_of(f"search.sampler={own_module}:Unseeded", "trials=2")
    unseeded = search(tmp_path / "d.db", spec)
    assert unseeded[0] != unseeded[1], "the same point is not tried again, but one near it"
    assert unseeded[0] == pytest.approx(unseeded[1], rel=0.5)


@pytest.mark.parametrize(
    ("sampler", "arguments", "message"),
    [
        (
            "nowhere:X",
            "{}",
            r"sampler: 'nowhere:X': the module 'nowhere' could not be imported .*correct the.*",
        ),
        (
            "optuna.samplers:TPSampler",
            "{}",
            r"sampler: .* it has no 'TPSampler' \(did you mean 'TPESampler'\?\); name a class.*",
        ),
        ("optuna.study:Study", "{}", r"sampler: .*Study' is no optuna\.samplers\.BaseSampler.*"),
        (
            "OWN:Mine",
            "{width: 3}",
            r"arguments\.width: Mine takes no such argument; valid: shift; remove it",
        ),
        ("tpe", "{seed: 3}", r"arguments\.seed: it has a key of its own; set seed"),
        (
            "grid",
            "{order: 3}",
            r"arguments\.order: grid takes no such argument; valid: none; remove it",
        ),
        (
            "qmc",
            "{qmc_type: sobel}",
            r"sampler: qmc refuses .*sobel.*; change search\.arguments.*",
        ),
    ],
)
def test_sampler_that_cannot_be_built_is_refused(
    own_module: str, sampler: str, arguments: str, message: str
) -> None:
    name = sampler.replace("OWN", own_module)
    spec = spec_of(
        "space={train.accumulation: {choice: [1, 2, 4]}}", "trials=3",
        f"search.sampler={name}", f"search.arguments={arguments}",
    )  # fmt: skip
    with pytest.raises(SamplerRejected) as refused:
        dry_run(spec)
    assert re.fullmatch(rf"search\.{message}", str(refused.value))


@pytest.mark.parametrize(
    ("sampler", "arguments", "message"),
    [
        ("tpe", "{gamma: 0.1}", r"\(TypeError: 'float' object is not callable\)"),
        ("tpe", "{n_ei_candidates: 0}", r"\(ValueError: .*must be positive.*\)"),
        ("cmaes", "{x0: {train.optimizer.lr: 0.01}}", r"\(AssertionError: .*\)"),
    ],
)
def test_argument_that_breaks_later_is_refused_at_start(
    sampler: str, arguments: str, message: str
) -> None:
    spec = spec_of(f"search.sampler={sampler}", f"search.arguments={arguments}")
    check_sampler(spec)  # it can be built
    with pytest.raises(SamplerRejected) as refused:
        dry_run(spec)
    given = re.escape(arguments)
    assert re.fullmatch(
        rf"search\.arguments: {sampler} with {given} fails at trial \d of a dry run {message}; "
        r"a sampler suggests a point whatever has ended; change search\.arguments, or choose "
        "another sampler",
        str(refused.value),
    )


def test_argument_that_forbids_warm_start_is_refused() -> None:
    arguments = "{sigma0: 0.1}"
    cmaes = ("search.sampler=cmaes", f"search.arguments={arguments}")
    dry_run(spec_of(*cmaes))
    with pytest.raises(SamplerRejected) as refused:
        dry_run(spec_of(*cmaes, "search.warm_start=old"))
    assert re.fullmatch(
        rf"search\.sampler: cmaes refuses {re.escape(arguments)} beside trials of "
        r"search\.warm_start: .*prohibited.*; change search\.arguments or leave "
        r"search\.warm_start out",
        str(refused.value),
    )


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ("search.sampler=optuna.samplers:CmaEsSampler", "metric=[a, b]", "mode=[min, max]"),
            "CmaEsSampler cannot be used",
        ),
        (("search.sampler=optuna.samplers:BruteForceSampler",), "step must be given"),
    ],
)
def test_sampler_unfit_for_the_space_is_refused(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(
        SamplerRejected, match=rf"^search\.sampler: .*{message}.*; change the space"
    ):
        dry_run(spec_of(*more))


def test_dry_run_shows_a_sampler_only_its_own_attributes(own_module: str) -> None:
    dry_run(spec_of(f"search.sampler={own_module}:Noting", "trials=40"))


@pytest.mark.parametrize(
    "sampler", samplers("tpe", "gp", "cmaes", "nsgaii", "random", "qmc", "grid")
)
def test_dry_run_accepts_working_arguments(sampler: str) -> None:
    spaces = [
        "{}",
        "{task.a: {choice: [1]}}",
        "{task.a: {choice: [x, y]}, task.n: {int: [1, 3], when: {task.a: y}}, "
        "task.m: {quniform: [0, 1, 0.5]}}",
    ]
    for space in spaces if sampler != "grid" else spaces[1:]:
        for startup in (2, 30):
            wanted = (f"search.startup_trials={startup}", f"space={space}", "trials=1")
            dry_run(spec_of(f"search.sampler={sampler}", *wanted))
            if sampler != "grid":
                dry_run(spec_of(f"search.sampler={sampler}", *wanted, "trials=40"))
    constrained = "search.constraints=['train.optimizer.lr * train.clip.max_norm < 0.1']"
    if sampler != "grid":
        dry_run(spec_of(f"search.sampler={sampler}", constrained))


def test_inexpressible_options_are_not_listed_as_valid() -> None:
    for sampler, never in (
        ("tpe", {"gamma", "weights", "constraints_func"}),
        ("cmaes", {"independent_sampler", "source_trials"}),
        ("nsgaii", {"mutation", "crossover", "child_generation_strategy"}),
    ):
        with pytest.raises(SamplerRejected, match="takes no such argument") as refused:
            check_sampler(spec_of(f"search.sampler={sampler}", "search.arguments={nothing: 1}"))
        valid = re.findall(r"\w+", str(refused.value).partition("valid: ")[2])
        assert len(valid) > 3
        assert not never & set(valid)


def test_missing_sampler_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SamplerRejected, match=r"cmaes needs .* run `pip install cmaes`"):
        check_sampler(spec_of("search.sampler=cmaes"))


def test_conditional_suggestions_ignore_set_order(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; "
        "from tests.unit.sweeps.search.serial_search import *; "
        "print(search(Path(sys.argv[1]), spec_of('trials=14', 'search.startup_trials=4', "
        "'space={task.a: {choice: [x, y]}, task.b: {uniform: [0, 1], when: {task.a: x}}, "
        "task.c: {uniform: [0, 1], when: {task.a: x}}, task.d: {uniform: [0, 1]}}')))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / f"{seed}.db")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.getcwd()},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(found) == 1
