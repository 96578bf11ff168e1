"""The provenance of a sweep: which changes a resume refuses, and the message."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sweeps.errors import OriginChanged
from sweeps.ledger.ledger import Ledger
from sweeps.spec.resume_checks import Origin, check_origin, workers_tag
from sweeps.spec.spec import SweepSpec, parse_spec
from tests.specs import with_overrides

SPEC = """
name: quad
task: {name: digits, width: 8}
metric: val/loss
mode: min
trials: 4
"""
BEFORE = Origin({"my_task.py": "a" * 64, "parts/model.py": "b" * 64}, "d" * 64)


@pytest.fixture
def spec() -> SweepSpec:
    return parse_spec(SPEC, "quad.yaml")


@pytest.mark.parametrize(
    ("now", "settings", "difference"),
    [
        pytest.param(
            Origin({**BEFORE.code, "my_task.py": "c" * 64}, BEFORE.data), [],
            "my_task.py aaaaaaaaaaaa -> cccccccccccc", id="edited",
        ),
        pytest.param(
            Origin({"my_task.py": "a" * 64}, BEFORE.data), [],
            "parts/model.py bbbbbbbbbbbb -> none", id="removed",
        ),
        pytest.param(
            Origin(BEFORE.code, "e" * 64), [], "data dddddddddddd -> eeeeeeeeeeee", id="other data"
        ),
        pytest.param(Origin(BEFORE.code), [], "data dddddddddddd -> none", id="unknown data"),
        pytest.param(BEFORE, ["task.width=16"], "task.width 8 -> 16", id="task"),
        pytest.param(BEFORE, ["seed=1"], "seed 0 -> 1", id="seed"),
    ],
)  # fmt: skip
def test_change_is_refused_with_a_diff_unless_allowed(
    spec: SweepSpec, now: Origin, settings: list[str], difference: str
) -> None:
    new = with_overrides(spec, settings)
    with pytest.raises(OriginChanged) as refused:
        check_origin(BEFORE, now, spec, new, accepted=False)
    assert f": {difference}; trials before and after" in str(refused.value)
    assert str(refused.value).endswith("accept it with --accept-changes")
    check_origin(BEFORE, now, spec, new, accepted=True)


@pytest.mark.parametrize("settings", [["name=other"], ["metric=val/accuracy"], ["mode=max"]])
def test_ranking_settings_never_change(spec: SweepSpec, settings: list[str]) -> None:
    key = settings[0].partition("=")[0]
    with pytest.raises(OriginChanged, match=rf"{key} is .* cannot become .*`sweep run FILE"):
        check_origin(BEFORE, BEFORE, spec, with_overrides(spec, settings), accepted=True)


def test_other_number_of_workers_must_be_accepted(spec: SweepSpec) -> None:
    two, three = (with_overrides(spec, [f"resources.workers={n}"]) for n in (2, 3))
    for old, new in ((spec, two), (two, three), (two, spec)):
        with pytest.raises(OriginChanged, match=r"up to rounding.*within an epoch.*--accept-"):
            check_origin(BEFORE, BEFORE, old, new, accepted=False)
        check_origin(BEFORE, BEFORE, old, new, accepted=True)
    spread = with_overrides(two, ["resources.placement=spread"])
    check_origin(BEFORE, BEFORE, two, spread, accepted=False)


def test_workers_are_a_tag_once_there_were_several(spec: SweepSpec) -> None:
    two = with_overrides(spec, ["resources.workers=2"])
    assert workers_tag([spec, spec]) == {}
    assert workers_tag([spec, two]) == {"gradsweep.workers": "2"}
    assert workers_tag([two, spec]) == {"gradsweep.workers": "1"}


def test_equivalent_spelling_is_no_change(spec: SweepSpec) -> None:
    more = with_overrides(spec, ["trials=9", "concurrency=1", "failures.max_retries=0"])
    check_origin(BEFORE, BEFORE, spec, more, accepted=False)
    check_origin(Origin(), BEFORE, spec, spec, accepted=False)


def test_ledger_keeps_the_fingerprint(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l.db", mode="min", sweep_id="s")
    assert ledger.origin == Origin()
    ledger.store_origin(BEFORE)
    assert Ledger.open(tmp_path / "l.db").origin == BEFORE


def test_run_tags_stay_short_for_many_files() -> None:
    tags = BEFORE.tags()
    assert tags.keys() == {"gradsweep.code", "gradsweep.data"}
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in tags.values())
    assert Origin({**BEFORE.code, "my_task.py": "c" * 64}).tags() != Origin(BEFORE.code).tags()
    assert set(Origin().tags().values()) == {"unknown"}


SAMPLES = {"arguments": "a", "train: its length": 24, "train[17]": ["float", [1.0, 2.0]]}


def _with_samples(**other: object) -> Origin:
    return Origin(BEFORE.code, BEFORE.data, {**SAMPLES, **other})


def test_other_samples_are_refused_with_a_diff(spec: SweepSpec) -> None:
    now = _with_samples(**{"train[17]": ["float", [1.0, 2.1]]})
    with pytest.raises(OriginChanged, match=r"builds differs in train\[17\]; trials before"):
        check_origin(_with_samples(), now, spec, spec, accepted=False)
    check_origin(_with_samples(), now, spec, spec, accepted=True)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        pytest.param(
            _with_samples(), _with_samples(**{"train[17]": ["float", [1.00001, 2.0]]}),
            id="rounded",
        ),
        pytest.param(BEFORE, _with_samples(), id="unknown before"),
        pytest.param(
            _with_samples(), _with_samples(**{"arguments": "b", "train: its length": 3}),
            id="other arguments",
        ),
    ],
)  # fmt: skip
def test_samples_that_may_differ_are_accepted(
    spec: SweepSpec, before: Origin, now: Origin
) -> None:
    check_origin(before, now, spec, spec, accepted=False)


def test_ledger_keeps_a_summary_of_the_samples(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l.db", mode="min", sweep_id="s")
    ledger.store_origin(BEFORE)
    assert ledger.origin.samples == {}
    ledger.store_origin(_with_samples())
    assert Ledger.open(tmp_path / "l.db").origin == _with_samples()
