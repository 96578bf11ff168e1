"""The spec file of a sweep: revisions are appended, and a damaged one is never read as a spec."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from sweeps.errors import RevisionError, SpecError
from sweeps.spec.revisions import (
    describe_changes,
    is_unchanged,
    read_revisions,
    read_spec,
    write_spec,
)
from sweeps.spec.spec import SweepSpec, parse_spec, parse_with_positions
from tests.specs import with_overrides

SPEC = """
name: quad---
task: digits
metric: val/loss
mode: min
trials: 4
space:
  train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}
"""


@pytest.fixture
def first() -> SweepSpec:
    return parse_spec(SPEC.replace("quad---", "quad"), "quad.yaml")


@pytest.fixture
def second(first: SweepSpec) -> SweepSpec:
    return with_overrides(first, ["trials=8", "train.batch_size=32"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep.yaml"


def test_change_is_appended_with_date_and_diff(
    path: Path, first: SweepSpec, second: SweepSpec
) -> None:
    write_spec(path, first)
    before = path.read_bytes()
    write_spec(path, second)
    after = path.read_bytes()
    assert after.startswith(before)
    line = after[len(before) :].decode().splitlines()[1]
    assert re.fullmatch(
        r"# format 4, revision 2, \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ: trials: 4 -> 8, "
        r"train\.batch_size: 64 -> 32",
        line,
    )
    assert read_spec(path)[:3] == (second, 2, None)
    assert read_revisions(path) == [first, second]
    assert [entry.name for entry in path.parent.iterdir()] == ["sweep.yaml"]


def test_unchanged_spec_writes_no_revision(path: Path, first: SweepSpec) -> None:
    write_spec(path, first)
    before = path.stat()
    write_spec(path, first)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize(
    "change",
    [
        "space={task.x: {choice: [true, 2]}, task.y: {int: [1, 2]}}",
        "space={task.x: {choice: [1.0, 2]}, task.y: {int: [1, 2]}}",
        "space={task.y: {int: [1, 2]}, task.x: {choice: [1, 2]}}",  # in which a grid is nested
        "task={name: digits, width: true}",
    ],
)
def test_values_equal_only_in_python_are_a_change(tmp_path: Path, change: str) -> None:
    task, space = "{name: digits, width: 1}", "{task.x: {choice: [1, 2]}, task.y: {int: [1, 2]}}"
    spec = parse_spec(
        SPEC.replace("quad---", "quad"), "s.yaml", [f"task={task}", f"space={space}"]
    )
    changed = with_overrides(spec, [change])
    assert changed == spec
    assert not is_unchanged(spec, changed)
    path = tmp_path / "sweep.yaml"
    write_spec(path, spec)
    write_spec(path, changed)
    found = read_spec(path)
    assert (found.number, found.spec.to_yaml()) == (2, changed.to_yaml())


def test_dashes_in_a_value_start_no_revision(path: Path) -> None:
    spec = parse_spec(SPEC.replace("task: digits", 'task: {name: "a:B", x: "---"}'), "quad.yaml")
    write_spec(path, spec)
    assert read_spec(path).spec == spec


def test_driver_killed_while_writing_leaves_the_old_file(
    path: Path, first: SweepSpec, second: SweepSpec
) -> None:
    write_spec(path, first)
    aside = path.with_name(".sweep.yaml.tmp")
    aside.write_bytes(b"half")
    assert read_spec(path)[:3] == (first, 1, None)
    write_spec(path, second)
    assert read_spec(path).spec == second
    assert not aside.exists()


def test_truncation_gives_a_written_revision_or_an_error(
    path: Path, first: SweepSpec, second: SweepSpec
) -> None:
    write_spec(path, first)
    one = len(path.read_bytes())
    write_spec(path, second)
    whole = path.read_bytes()
    for cut in {*range(0, len(whole), 23), *range(one - 80, one + 8), len(whole) - 1}:
        path.write_bytes(whole[:cut])
        if cut < one:
            with pytest.raises(
                RevisionError, match=f"{re.escape(str(path))} has no valid revision"
            ):
                read_spec(path)
        else:
            found = read_spec(path)
            assert (found.spec, found.number) == (first, 1)
            if cut > one + len(b"---\n"):
                assert found.damage is not None
                assert "what follows revision 1 cannot be used" in found.damage


def test_flipped_bits_give_a_written_revision_or_an_error(
    path: Path, first: SweepSpec, second: SweepSpec
) -> None:
    write_spec(path, first)
    single = path.read_bytes()
    draw = random.Random(0)
    for bit in draw.sample(range(8 * len(single)), 150):
        path.write_bytes(_flip(single, bit))
        with pytest.raises(RevisionError):
            read_spec(path)
    path.write_bytes(single)
    write_spec(path, second)
    whole = path.read_bytes()
    for bit in draw.sample(range(8 * len(whole)), 150):
        path.write_bytes(_flip(whole, bit))
        found = read_spec(path)
        assert found.spec == (second if found.number == 2 else first)
        assert found.number == 2 or found.damage is not None


def test_revision_after_a_damaged_one(path: Path, first: SweepSpec, second: SweepSpec) -> None:
    write_spec(path, first)
    write_spec(path, second)
    path.write_bytes(path.read_bytes()[:-30])
    third = with_overrides(first, ["trials=6"])
    write_spec(path, third)
    found = read_spec(path)
    assert found[:3] == (third, 3, None)
    lines = path.read_text().splitlines()
    assert found.text.splitlines()[lines.index("trials: 6")] == "trials: 6"
    _, document = parse_with_positions(found.text, "sweep.yaml")
    assert document.position(("trials",)).where == f"sweep.yaml:{lines.index('trials: 6') + 1}:9"


def test_manual_edit_is_told_how_to_change_a_sweep(path: Path, first: SweepSpec) -> None:
    write_spec(path, first)
    path.write_text(path.read_text().replace("trials: 4", "trials: 5"))
    with pytest.raises(RevisionError, match=r"edited; .* `sweep resume NAME -s KEY=VALUE`"):
        read_spec(path)


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("  train.batch_size: {logint: [16, 256]}\ntrain: {accumulation: 4}\n", "batch_size"),
        ("train: {optimizer: {betas: [0.9, 1.0]}}\n", r"betas\[1\]: 1.0 is not a decay rate"),
        ("resources: {cpu: 1.0e-5}\n", "resources.cpu: .* is too small; Ray counts"),
        ("resources: {gpu: 1.0e-5}\n", "resources.gpu: .* is too small; Ray counts"),
    ],
)
def test_invalid_old_sweep_is_readable_and_not_resumable(
    path: Path, written: str, told: str
) -> None:
    then = parse_spec(SPEC + written, "quad.yaml", drawn=None)
    write_spec(path, then)
    found = read_spec(path)
    assert found.spec == then
    assert read_revisions(path) == [then]
    with pytest.raises(SpecError, match=told):
        parse_with_positions(found.text, str(path), ["trials=8"], drawn=4)


def test_change_is_described_in_one_line(first: SweepSpec) -> None:
    other = with_overrides(first, ["task.width=8", "space={}"])
    assert describe_changes(first, other) == (
        "space.train.optimizer.lr.loguniform: [0.0001, 0.1] -> nothing, task.width: nothing -> 8"
    )


def _flip(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_number_of_workers_is_named_also_at_its_default(first: SweepSpec) -> None:
    two = with_overrides(first, ["resources.workers=2"])
    assert describe_changes(first, two) == "resources.workers: 1 -> 2"
    assert describe_changes(two, first) == "resources.workers: 2 -> 1"
