"""Suggestions depend on the ledger alone, not on the number of restarts of the driver."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from ray.tune.search import Searcher

from sweeps.errors import LockLost, SpecError
from sweeps.ledger.attributes import ACCUMULATION, WOULD_STOP
from sweeps.ledger.ledger import Ledger
from sweeps.ledger.reader import LedgerReader
from sweeps.ledger.trials import TrialRecord
from sweeps.search.searcher import Capacity, DriverCallbacks, LedgerSearcher
from sweeps.search.suggest import Suggester
from sweeps.spec.sections import EarlyStoppingConfig
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.schedulers import is_exempt, make_scheduler
from sweeps.sweep_lock import SweepLock
from tests.memory_recorder import MemoryRecorder
from tests.slices import samplers
from tests.unit.sweeps.search.serial_driver import SPEC, Driver, loss_of
from tests.unit.sweeps.sweep_factory import MadeSweep


@pytest.fixture
def spec() -> SweepSpec:
    return parse_spec(SPEC, "quad.yaml")


def _run(path: Path, spec: SweepSpec, *, killed_after: set[int]) -> list[dict[str, Any]]:
    """Run to the end; after the given trials were asked for, the driver dies without telling."""
    driver = Driver(path, spec)
    for turn in range(100):
        config = driver.ask(f"t{turn}")
        if config == Searcher.FINISHED:
            return [dict(trial.params) for trial in driver.ledger.trials()]
        if config["number"] in killed_after:
            killed_after = killed_after - {config["number"]}
            driver = Driver(path, spec)
        else:
            driver.tell(f"t{turn}", config)
    raise AssertionError("the search did not end")


def test_suggestions_after_resume_equal_those_of_one_driver(
    tmp_path: Path, spec: SweepSpec
) -> None:
    once = _run(tmp_path / "once.db", spec, killed_after=set())
    killed = _run(tmp_path / "killed.db", spec, killed_after={0, 2, 5})
    assert len(once) == 8
    assert killed == once


def test_unfinished_trial_is_resumed_first_unchanged(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    first = driver.ask("a")
    again = Driver(tmp_path / "l.db", spec).ask("b")
    assert (again["number"], again["params"], again["config"]) == (
        0,
        first["params"],
        first["config"],
    )


def test_no_more_than_the_concurrency_are_live(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    driver.ask("a")
    assert driver.ask("b") is None
    driver.searcher.on_trial_complete("a")
    assert driver.ask("b")["number"] == 1


@pytest.mark.parametrize(
    ("sampler", "scheduler", "expected"),
    [
        pytest.param("tpe", "none", [0, 1, 2], id="right before a trial is proposed"),
        pytest.param("random", "none", [], id="a sampler that learns nothing"),
        pytest.param("random", "asha_promote", [0, 3], id="who pauses, after each end"),
    ],
)
def test_pending_reports_are_waited_for_only_if_needed(
    tmp_path: Path, spec: SweepSpec, sampler: str, scheduler: Any, expected: list[int]
) -> None:
    """As many trials as there were then."""
    search = spec.search.model_copy(update={"sampler": sampler})
    early = EarlyStoppingConfig(scheduler=scheduler)
    changed = {"search": search, "early_stopping": early, "trials": 3}
    driver = Driver(tmp_path / "l.db", spec.model_copy(update=changed))
    settled: list[int] = []
    driver.searcher._driver = replace(
        driver.searcher._driver, flush=lambda: settled.append(len(driver.ledger.trials()))
    )
    driver.searcher._capacity = Capacity(4, 1)
    for turn in range(5):
        driver.ask(f"t{turn}")
    driver.searcher.on_trial_complete("t0")
    driver.ask("t5")
    assert settled == expected


def test_no_trial_is_suggested_while_stopping(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    driver.searcher.stopping = True
    assert driver.ask("a") == Searcher.FINISHED
    assert driver.ledger.trials() == []


@pytest.mark.parametrize(
    "sampler", samplers("tpe", "random", "qmc", "grid", "nsgaii", "cmaes", "gp")
)
def test_search_goes_on_as_if_no_trial_was_finished(tmp_path: Path, sampler: str) -> None:
    text = SPEC.replace("sampler: tpe", f"sampler: {sampler}").replace("trials: 8", "trials: 10")
    if sampler == "grid":
        text = text.replace("{loguniform: [1.0e-4, 1.0e-1]}", "{choice: [0.001, 0.01, 0.1]}")
        text = text.replace("{loguniform: [0.1, 10]}", "{choice: [0.5, 1.0, 2.0, 4.0]}")
    sweep = parse_spec(text, "quad.yaml")
    first = {"train.optimizer.lr": 0.01, "train.clip.max_norm": 2.0}
    points = [first, {**first, "train.clip.max_norm": 4.0}] * 3
    search = sweep.search.model_copy(update={"try_first": points[:5]})
    sweep = sweep.model_copy(update={"search": search})
    suggested: dict[str, list[dict[str, Any]]] = {}
    for case in ("with", "without"):
        ledger = Ledger.create(tmp_path / f"{case}.db", mode="min", sweep_id="s")
        found = suggested.setdefault(case, [])
        while len(found) < 10:
            number = len(ledger.trials())
            found.append(ledger.add(Suggester(sweep, ledger).propose(number)).params)
            ledger.report(number, epoch=1, step=1, value=loss_of(found[-1]))
            ledger.finish(number, "pruned" if len(found) == 2 else "complete")
            if case == "with" and len(found) in (4, 7, 8):
                new = ledger.add_extra("finish", 1).number
                ledger.report(new, epoch=1, step=1, value=-1.0)
                if len(found) != 7:
                    ledger.finish(new, "complete")
    assert suggested["with"] == suggested["without"]


def test_runs_added_meanwhile_come_first_and_change_no_suggestion(
    tmp_path: Path, spec: SweepSpec
) -> None:
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for case in ("with", "without"):
        driver = Driver(tmp_path / f"{case}.db", spec)
        waiting = [0, 1] if case == "with" else []
        ledger = driver.ledger

        def add_extra(waiting: list[int] = waiting, ledger: Ledger = ledger) -> list[TrialRecord]:
            if not waiting or len(ledger.trials()) < 3:
                return []
            return [ledger.add_extra("confirm", 0, waiting.pop(0))]

        driver.searcher._driver = replace(driver.searcher._driver, add_extra=add_extra)
        while (config := driver.ask("t")) != Searcher.FINISHED:
            driver.tell("t", config)
            found.setdefault(case, []).append((config["role"], config["params"]))
    roles = [role for role, _ in found["with"]]
    assert roles == ["search"] * 3 + ["confirm"] * 2 + ["search"] * 5
    assert [one for one in found["with"] if one[0] == "search"] == found["without"]


def test_paused_trial_teaches_the_sampler_like_a_stopped_one(
    tmp_path: Path, spec: SweepSpec
) -> None:
    suggested: dict[str, list[dict[str, Any]]] = {}
    for scheduler in ("asha", "asha_promote"):
        early = EarlyStoppingConfig(scheduler=scheduler, grace_epochs=1, reduction=2)
        sweep = spec.model_copy(update={"early_stopping": early})
        ledger = Ledger.create(tmp_path / f"{scheduler}.db", mode="min", sweep_id="s")
        for number in range(6):
            params = ledger.add(Suggester(sweep, ledger).propose(number)).params
            suggested.setdefault(scheduler, []).append(params)
            ledger.report(number, epoch=1, step=1, value=loss_of(params))
            if number == 0:
                ledger.finish(number, "complete")
            elif scheduler == "asha":
                ledger.finish(number, "pruned")
    assert suggested["asha_promote"] == suggested["asha"]


def test_paused_trial_is_returned_only_once_promoted(tmp_path: Path, spec: SweepSpec) -> None:
    early = EarlyStoppingConfig(scheduler="asha_promote", grace_epochs=1, reduction=2)
    sweep = spec.model_copy(update={"early_stopping": early, "trials": 3})
    driver = Driver(tmp_path / "l.db", sweep)

    def train(turn: str, config: Any, *values: float) -> None:
        known = len(driver.ledger.trial(config["number"]).reports)
        for epoch, value in enumerate(values, start=known + 1):
            driver.ledger.report(config["number"], epoch=epoch, step=epoch, value=value)
        driver.searcher.on_trial_complete(turn)

    first = driver.ask("a")
    assert (first["number"], first["pause_at_epoch"]) == (0, 1)
    train("a", first, 0.5)
    second = driver.ask("b")
    assert (second["number"], second["pause_at_epoch"]) == (1, 1), "one of one has no place"
    train("b", second, 0.4)
    driver = Driver(tmp_path / "l.db", sweep)  # which does not take up those that wait
    promoted = driver.ask("c")
    assert (promoted["number"], promoted["pause_at_epoch"]) == (1, 2)
    assert promoted["config"]["budget"]["epochs"] == 3, "the horizon is that of the whole budget"
    assert driver.ask("d") is None
    train("c", promoted, 0.3)
    third = driver.ask("e")
    assert (third["number"], third["pause_at_epoch"]) == (2, 1)
    assert driver.searcher.never_promoted() == {}
    train("e", third, 0.6)
    last = driver.ask("f")
    assert (last["number"], last["pause_at_epoch"]) == (1, None), (
        "nobody else would train to the end"
    )
    train("f", last, 0.2)
    driver.ledger.finish(1, "complete")
    assert driver.ask("g") == Searcher.FINISHED
    assert driver.searcher.never_promoted().keys() == {0, 2}


@pytest.mark.parametrize(
    ("train", "accumulation"),
    [
        ({"batch_size": 64}, 4),
        ({"batch_size": 18}, 1),
        ({"batch_size": 64, "accumulation": 8}, 8),
    ],
)
def test_smaller_micro_batches_are_kept_if_they_fit(
    tmp_path: Path, spec: SweepSpec, train: dict[str, int], accumulation: int
) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    driver.ledger.set_attr(driver.ask("a")["number"], ACCUMULATION, 4)
    now = spec.model_copy(update={"train": spec.train.model_copy(update=train)})
    config = Driver(tmp_path / "l.db", now).ask("b")
    assert (config["number"], config["config"]["train"]["accumulation"]) == (0, accumulation)


def test_stop_waits_for_live_trials(tmp_path: Path, spec: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", spec)
    driver.searcher._capacity = Capacity(2, 1)
    driver.ask("a")
    driver.searcher.paused = True
    assert driver.ask("b") is None
    driver.searcher.on_trial_complete("a")
    assert driver.ask("b") == Searcher.FINISHED
    assert len(driver.ledger.trials()) == 1


@pytest.fixture
def grouped() -> SweepSpec:
    points = [{"resources.workers": number} for number in (2, 1, 2, 1)]
    found = {
        "space": {
            "resources.workers": {"choice": [1, 2]},
            "train.optimizer.lr": {"uniform": [0.1, 0.2]},
        },
        "search": {"sampler": "random", "try_first": points},
        "trials": 4,
    }
    return parse_spec(yaml.dump(yaml.safe_load(SPEC) | found), "s.yaml")


def test_trial_waits_until_its_whole_group_fits(tmp_path: Path, grouped: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", grouped)
    driver.searcher._capacity = Capacity(9, 1, 3)
    asked = [driver.ask(name) for name in "abc"]
    assert [one and (one["number"], one["workers"]) for one in asked] == [(0, 2), (1, 1), None]
    driver.searcher.on_trial_complete("b")
    assert driver.ask("d") is None, "no smaller one goes before it"
    driver.searcher.on_trial_complete("a")
    assert [driver.ask(name)["number"] for name in "ef"] == [2, 3]
    assert len(driver.ledger.trials()) == 4


def test_stopped_trial_waits_no_longer(tmp_path: Path, grouped: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", grouped)
    driver.searcher._capacity = Capacity(9, 1, 3)
    for name in "abc":
        driver.ask(name)
    driver.ledger.finish(2, "pruned")
    driver.searcher.on_trial_complete("b")
    assert driver.ask("d")["number"] == 3


def test_met_stop_criterion_holds_a_waiting_trial_back(tmp_path: Path, grouped: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", grouped)
    driver.searcher._capacity = Capacity(9, 1, 3)
    for name in "abc":
        driver.ask(name)
    driver.searcher.paused = True
    for name in "ab":
        driver.searcher.on_trial_complete(name)
    assert driver.searcher.suggest("d") == Searcher.FINISHED
    driver.searcher.paused = False
    assert driver.ask("e")["number"] == 2


def test_waiting_trial_starts_after_a_restart(tmp_path: Path, grouped: SweepSpec) -> None:
    driver = Driver(tmp_path / "l.db", grouped)
    driver.searcher._capacity = Capacity(9, 1, 3)
    for name in "abc":
        driver.ask(name)
    driver = Driver(tmp_path / "l.db", grouped)
    driver.searcher._capacity = Capacity(9, 1, 9)
    asked = [driver.ask(name) for name in "abcd"]
    assert [(one["number"], one["workers"]) for one in asked] == [(0, 2), (1, 1), (2, 2), (3, 1)]


def test_group_larger_than_the_machine_fails_its_trial(tmp_path: Path, grouped: SweepSpec) -> None:
    """As a further seed of a trial that another machine has trained."""
    driver = Driver(tmp_path / "l.db", grouped)
    refused: list[int] = []
    driver.searcher._capacity = Capacity(1, 1, 1)

    def refuse(number: int, error: SpecError) -> None:
        refused.append(number)
        driver.ledger.finish(number, "failed", reason=str(error))

    driver.searcher._driver = replace(driver.searcher._driver, refuse=refuse)
    assert driver.ask("a")["number"] == 1
    assert refused == [0]
    assert "2 workers, and 1" in str(driver.ledger.trial(0).reason)


def test_invalid_configuration_fails_its_trial(tmp_path: Path) -> None:
    """More of them than the same failures that end a sweep: it goes on with what can be one."""
    space = {"train.batch_size": {"choice": [100]}, "train.accumulation": {"choice": [8, 3, 1]}}
    made = MadeSweep(tmp_path, space=json.dumps(space), more="failures: {same_failure_limit: 1}")
    recorder, shown = MemoryRecorder(), []
    view: Any = SimpleNamespace(ended=lambda *told: shown.append(told))
    book = made.handler(recorder, view)
    searcher = LedgerSearcher(
        made.ledger,
        made.spec,
        made.paths,
        DriverCallbacks(fence=lambda: None, refuse=book.refuse, flush=book.flush),
        Capacity(9, 1),
    )
    fit = []
    while isinstance(config := searcher.suggest(f"t{len(fit)}"), dict):
        assert config["config"]["train"]["accumulation"] == 1
        fit.append(config["number"])
    refused = [trial for trial in made.ledger.trials() if trial.finished]
    assert sorted([*fit, *(trial.number for trial in refused)]) == [0, 1, 2]
    assert len(refused) > 1
    for trial in refused:
        assert (trial.state, trial.attempts) == ("failed", 0)
        assert str(trial.reason).startswith("config: ")
        run = recorder.runs[trial.number]
        assert (run.status, run.tags["failure.kind"]) == ("FAILED", "config")
        assert run.params["train.accumulation"] in ("3", "8")
    assert shown == [(trial.number, "failed", None, trial.reason) for trial in refused]
    assert book.abort_reason is None


def test_driver_without_the_lock_adds_no_trial(tmp_path: Path, spec: SweepSpec) -> None:
    lock = SweepLock(tmp_path / "lock")
    lock.acquire()
    driver = Driver(tmp_path / "ledger.db", spec, lock.check)
    driver.tell("t0", driver.ask("t0"))
    (tmp_path / "lock").unlink()
    with pytest.raises(LockLost):
        driver.ask("t1")
    assert [trial.number for trial in driver.ledger.trials()] == [0]
    lock.release()


@pytest.mark.parametrize(
    ("scheduler", "each_alone"),
    [("none", False), ("asha", True), ("hyperband", True), ("median", True)],
)
def test_reports_are_buffered_unless_a_rule_decides(
    tmp_path: Path, spec: SweepSpec, scheduler: Any, each_alone: bool
) -> None:
    early = EarlyStoppingConfig(scheduler=scheduler)
    driver = Driver(tmp_path / "ledger.db", spec.model_copy(update={"early_stopping": early}))
    assert (driver.ask("t0")["report_buffer_seconds"] == 0) == each_alone


def test_finishing_trial_is_returned_first_and_exempt(tmp_path: Path, spec: SweepSpec) -> None:
    early = EarlyStoppingConfig(scheduler="asha_promote", grace_epochs=1, reduction=2)
    spec = spec.model_copy(update={"early_stopping": early})
    driver = Driver(tmp_path / "l.db", spec)
    first = driver.ask("a")
    driver.ledger.report(0, epoch=1, step=1, value=1.0)
    driver.ledger.finish(0, "pruned")
    driver.searcher.on_trial_complete("a")
    driver.ask("b")
    driver.ledger.add_extra("finish", 0)
    driver.ledger.report(2, epoch=1, step=1, value=1.0)  # at a rung, where others pause
    driver = Driver(tmp_path / "l.db", spec)
    driver.searcher.paused = True  # a stop criterion is met
    found = driver.ask("c")
    assert (found["number"], found["role"], found["pause_at_epoch"]) == (2, "finish", None)
    assert (found["params"], found["config"]) == (first["params"], first["config"])
    trial = SimpleNamespace(trial_id="c", config=found)
    scheduler = make_scheduler(
        spec.model_copy(
            update={"early_stopping": EarlyStoppingConfig(scheduler="asha", grace_epochs=1)}
        )
    )
    for number, value in ((0, 0.1), (1, 0.1)):
        other = SimpleNamespace(trial_id="o", config={"number": number})
        scheduler.on_trial_result(None, other, {"epoch": 1, "objective": value})
    assert scheduler.on_trial_result(None, trial, {"epoch": 1, "objective": 9.0}) == "CONTINUE"
    of_search = {**found, "role": "search"}
    trial = SimpleNamespace(trial_id="d", config=of_search)
    assert scheduler.on_trial_result(None, trial, {"epoch": 1, "objective": 9.0}) == "STOP"
    assert driver.ask("e") is None
    driver.ledger.finish(2, "complete")
    driver.searcher.on_trial_complete("c")
    assert driver.ask("e") == Searcher.FINISHED  # nothing else starts while a criterion is met
    driver.searcher.paused = False
    assert driver.ask("e")["number"] == 1


def test_exempt_trial_never_pauses_and_stays_exempt(tmp_path: Path, spec: SweepSpec) -> None:
    early = EarlyStoppingConfig(scheduler="asha_promote", grace_epochs=1, reduction=2, exempt=1.0)
    path, spec = tmp_path / "l.db", spec.model_copy(update={"early_stopping": early})
    driver = Driver(path, spec)
    found = driver.ask("a")
    assert (found["exempt"], found["pause_at_epoch"]) == (True, None)
    driver.ledger.report(0, epoch=1, step=1, value=1.0)  # at a rung, where others pause
    none = early.model_copy(update={"exempt": 0})
    driver = Driver(path, spec.model_copy(update={"early_stopping": none}))
    resumed = driver.ask("b")
    assert (resumed["number"], resumed["exempt"], resumed["pause_at_epoch"]) == (0, True, None)
    assert driver.searcher.never_promoted() == {}
    driver.ledger.set_attr(0, WOULD_STOP, [1, "asha at epoch 1: \x1b[31mbad"])
    driver.searcher.on_trial_complete("b")
    other = driver.ask("c")
    assert (other["number"], other["exempt"], other["pause_at_epoch"]) == (1, False, 1)
    for trials in (
        LedgerReader(path).trials,
        driver.ledger.trials(),
        LedgerReader(path).records(),
    ):
        assert [trial.exempt for trial in trials] == [True, False]
        assert [trial.would_stop_at for trial in trials] == [1, None]
        assert "\x1b" not in str(trials[0].would_stop_reason), "texts of a ledger are escaped"


def test_share_of_exempt_trials_is_about_that_of_the_spec() -> None:
    found = [is_exempt(0.05, seed, number) for seed in range(20) for number in range(200)]
    assert 0.04 < sum(found) / len(found) < 0.06
    assert not any(is_exempt(0, 0, number) for number in range(200))
    assert all(is_exempt(1, 0, number) for number in range(200))
