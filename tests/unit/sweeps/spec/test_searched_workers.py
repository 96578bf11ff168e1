"""A search over `resources.workers`: each trial has its own number, which all parts know."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.errors import SpecError
from sweeps.ledger.ledger import Ledger
from sweeps.paths import TRIAL_CONFIG
from sweeps.run.session import open_ledger
from sweeps.spec.own_values import resolve_search
from sweeps.spec.provenance_check import workers_tag
from sweeps.spec.searched_workers import WORKERS
from sweeps.spec.spec import SweepSpec, parse_spec, trial_yaml
from sweeps.view.compare import differences
from tests.unit.sweeps.sweep_factory import MadeSweep, prepared
from trainable.fingerprint import BUILT

SPEC = """
name: digits
task: digits
metric: val/loss
mode: min
trials: 3
resources: {{workers: {workers}}}
space:
  resources.workers: {searched}
  {more}
"""


def _spec(searched: str = "{choice: [1, 2, 4]}", workers: int = 1, more: str = "") -> SweepSpec:
    return parse_spec(SPEC.format(searched=searched, workers=workers, more=more), "s.yaml")


def test_trial_has_its_own_number_of_workers() -> None:
    spec = _spec(workers=3)
    for number in (1, 2, 4):
        assert spec.trial_config(0, {WORKERS: number}).workers == number
        assert spec.workers_of({WORKERS: number}) == number
    assert spec.trial_config(0, {}).workers == spec.workers_of({}) == 3


def test_number_outlives_a_space_that_no_longer_has_it() -> None:
    spec = _spec().model_copy(update={"space": {}})
    assert spec.trial_config(0, {WORKERS: 4}).workers == 4


@pytest.mark.parametrize(
    ("searched", "workers", "more", "expected"),
    [
        ("{choice: [4, 1, 2]}", 1, "", (1, 4)),
        ("{int: [2, 6], step: 2}", 1, "", (2, 6)),
        ("{powers: [1, 8, 2]}", 1, "", (1, 8)),
        (
            "{choice: [2, 4], when: {train.sharding: fsdp}}",
            1,
            "train.sharding: {choice: [none, fsdp]}",
            (1, 4),
        ),
    ],
)
def test_fewest_and_most_workers(
    searched: str, workers: int, more: str, expected: tuple[int, int]
) -> None:
    assert _spec(searched, workers, more).searched_workers == expected


def test_example_has_the_most_workers() -> None:
    assert _spec("{choice: [4, 1, 2]}").example_params() == {WORKERS: 4}
    assert _spec("{int: [1, 3]}").example_params() == {WORKERS: 3}


def test_number_in_the_file_is_tried_first() -> None:
    resolved = resolve_search(_spec(workers=2), {})
    assert resolved.spec.search.try_first == [{WORKERS: 2}]
    assert not resolved.cautions


def test_searched_number_is_no_tag_of_the_sweep() -> None:
    fixed = _spec(workers=2).model_copy(update={"space": {}})
    assert workers_tag([fixed, _spec(workers=2)]) == {}


@pytest.fixture
def made(tmp_path: Path) -> MadeSweep:
    sweep = MadeSweep(
        tmp_path,
        space="{resources.workers: {choice: [1, 2]}}",
        more="resources: {workers: 2}",
    )
    for number, workers in enumerate((1, 2)):
        sweep.add("complete", 0.5, params={WORKERS: workers})
        directory = sweep.paths.trial(number)
        directory.mkdir(parents=True)
        config = sweep.spec.trial_config(number, {WORKERS: workers})
        (directory / TRIAL_CONFIG).write_text(trial_yaml(config))
    return sweep


def test_views_have_the_number_of_each_trial(made: MadeSweep) -> None:
    assert [made.view.details(number)["workers"] for number in (0, 1)] == [None, 2]
    assert differences(made.view, 0, 1)["differing"] == {WORKERS: [1, 2]}


def test_devices_of_each_trial_are_counted(made: MadeSweep) -> None:
    ledger = made.ledger
    ledger.trial_resources = lambda params: (4.0 * made.spec.workers_of(params), 0.0)
    for workers in (1, 2):
        number = made.add(None, params={WORKERS: workers})
        ledger.store_trial_seconds(number, 10.0)
        assert ledger.trial(number).cpu_seconds == 40.0 * workers


def test_resume_refuses_a_trial_that_would_never_start(made: MadeSweep) -> None:
    number = made.add(None, params={WORKERS: 2})
    before = made.paths.spec.read_text()
    noted = made.paths.trial(number) / BUILT
    noted.parent.mkdir(parents=True, exist_ok=True)
    noted.write_text("{}")
    one = made.spec.model_copy(update={"space": {}})

    def resume(most: int) -> Ledger:
        return open_ledger(
            prepared(made.paths, one, new=False, accept_changes=True, max_workers=most), print
        )

    with pytest.raises(SpecError, match=rf"trial {number}: .* 2 workers, and 1 .*sweep stop"):
        resume(1)
    assert made.paths.spec.read_text() == before
    assert noted.exists(), "nothing changes before all checks have passed"
    resume(2)
    assert not noted.exists()
