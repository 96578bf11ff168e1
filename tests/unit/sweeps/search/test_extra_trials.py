"""A search decides the same whether or not its trials were finished or confirmed by others."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.search import Searcher

from sweeps.search.searcher import replayed_scheduler
from sweeps.spec.sections import EarlyStoppingConfig
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.unit.sweeps.search.serial_driver import SPEC, Driver, loss_of


@pytest.fixture
def spec() -> SweepSpec:
    return parse_spec(SPEC, "quad.yaml")


def _train_and_stop(driver: Driver, spec: SweepSpec) -> tuple[Any, ...] | None:
    """Train the next trial as long as its rule lets it; return all that was decided about it."""
    config = driver.ask("t")
    if config == Searcher.FINISHED:
        return None
    past = driver.ledger.trials()
    scheduler = replayed_scheduler(spec, past, lambda _: spec.budget.epochs or 0)
    trial, epoch, verdict = SimpleNamespace(config=config), 0, "CONTINUE"
    scheduler.on_trial_add(None, trial)
    while epoch < (spec.budget.epochs or 0) and verdict == "CONTINUE":
        epoch += 1
        loss = loss_of(config["params"]) + 1 / epoch
        driver.ledger.report(config["number"], epoch=epoch, step=epoch, value=loss)
        result = {"epoch": epoch, "objective": loss}
        verdict = scheduler.on_trial_result(None, trial, result)
    driver.ledger.finish(config["number"], "complete" if verdict == "CONTINUE" else "pruned")
    driver.searcher.on_trial_complete("t")
    return config["config"], config["exempt"], epoch, scheduler.would_stop.get(config["number"])


@pytest.mark.parametrize("roles", [["finish"], ["confirm", "confirm"], ["finish", "repeat"]])
@pytest.mark.parametrize("rule", ["asha", "hyperband"])
def test_search_goes_on_unchanged_after_extra_trials(
    tmp_path: Path, spec: SweepSpec, roles: list[Any], rule: Any
) -> None:
    early = EarlyStoppingConfig(scheduler=rule, reduction=2, exempt=0.3)
    spec = spec.model_copy(update={"early_stopping": early, "trials": 14})

    def run(path: Path, extra_after: int) -> list[Any]:
        driver, found = Driver(path, spec), []
        while (one := _train_and_stop(driver, spec)) is not None:
            found.append(one)
            if len(found) == extra_after:
                for index, role in enumerate(roles):
                    seed = None if role == "finish" else index
                    extra = driver.ledger.add_extra(role, 0, seed)
                    driver.ledger.report(extra.number, epoch=1, step=1, value=0.0)
                    driver.ledger.finish(extra.number, "complete")
                driver = Driver(path, spec)
        last = driver.ledger.trials()[-1]
        assert driver.ledger.add_extra("finish", last.number).seed == last.seed
        return found

    assert run(tmp_path / "extra.db", 3) == run(tmp_path / "alone.db", 99)
