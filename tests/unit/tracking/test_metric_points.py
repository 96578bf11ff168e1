from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from tracking.limits import MAX_KEY, clean_key, split_pairs
from tracking.metric_points import HighWaterMarks, Point, PointRow, Request

rows = st.lists(
    st.builds(
        PointRow,
        st.integers(0, 30),
        st.integers(0, 10**13),
        st.dictionaries(st.sampled_from(["a", "b", "c/d"]), st.floats(), min_size=1),
    ),
    max_size=20,
)


def pairs(points: list[Point]) -> list[tuple[str, int]]:
    return [(point.key, point.step) for point in points]


@given(rows, rows)
def test_no_key_and_step_is_admitted_twice(first: list[PointRow], second: list[PointRow]) -> None:
    marks = HighWaterMarks()
    admitted = (
        pairs(marks.filter_new(first))
        + pairs(marks.filter_new(second))
        + pairs(marks.filter_new(first))
    )
    assert len(admitted) == len(set(admitted))


def test_infinite_values_are_counted_and_nan_is_kept() -> None:
    marks = HighWaterMarks()
    first, second, third, fourth = marks.filter_new(
        [
            PointRow(1, 10, {"loss": math.inf, "lr": 0.1}),
            PointRow(2, 20, {"loss": math.nan}),
            PointRow(3, 30, {"loss": -math.inf}),
        ]
    )
    assert [first, second] == [("num_infinite/loss", 1.0, 1, 10), ("lr", 0.1, 1, 10)]
    assert (third.key, third.step) == ("loss", 2)
    assert math.isnan(third.value)
    assert fourth == ("num_infinite/loss", 2.0, 3, 30)
    assert marks.filter_new([PointRow(3, 30, {"loss": 1.0})]) == []


def test_only_steps_above_the_mark_are_new() -> None:
    """Also those of the counter of infinite values, which a row may have itself."""
    marks = HighWaterMarks({"loss": 5, "num_infinite/lr": 5}, {"num_infinite/lr": 2})
    rows = [PointRow(step, step, {"loss": 1.0, "lr": math.inf}) for step in (4, 5, 6)]
    assert marks.filter_new(rows) == [("loss", 1.0, 6, 6), ("num_infinite/lr", 3.0, 6, 6)]
    assert marks.steps == {"loss": 6, "lr": 6, "num_infinite/lr": 6}
    own = PointRow(7, 7, {"num_infinite/lr": 9.0, "lr": math.inf})
    assert marks.filter_new([own]) == [("num_infinite/lr", 9.0, 7, 7)]


def test_marks_rise_and_never_fall() -> None:
    marks = HighWaterMarks({"a": 5, "b": 1})
    marks.merge_max(HighWaterMarks({"a": 3, "b": 4, "c": 2}, {"num_infinite/a": 2}))
    assert marks == HighWaterMarks({"a": 5, "b": 4, "c": 2}, {"num_infinite/a": 2})


@given(st.text(max_size=300), st.text(max_size=300))
def test_cleaned_keys_are_accepted_and_stay_different(one: str, other: str) -> None:
    cleaned = clean_key(one)
    assert 0 < len(cleaned) <= MAX_KEY
    assert re.fullmatch(r"[/\w.\- :]+", cleaned)
    assert (cleaned == clean_key(other)) == (one == other)
    assert clean_key(cleaned) == cleaned


def test_pairs_are_split_by_count_and_encoded_bytes() -> None:
    assert [len(part) for part in split_pairs({str(i): "" for i in range(250)})] == [100, 100, 50]
    wide = {str(i): "é" * 6000 for i in range(100)}
    divided = list(split_pairs(wide))
    assert {key: value for part in divided for key, value in part.items()} == wide
    assert len(divided) == 5


def _sizes(request: Request) -> list[tuple[int, ...]]:
    return [tuple(map(len, part)) for part in request.split()]


def test_run_metadata_fits_into_few_requests() -> None:
    points = [Point("a", 1.0, step, 0) for step in range(900)]
    few = {str(i): "" for i in range(50)}
    assert list(Request(few, points, few).split()) == [Request(few, points, few)]
    assert _sizes(Request(few, points, {**few, "x": ""})) == [
        (50, 0, 0),
        (0, 900, 0),
        (0, 0, 51),
    ]
    wide = {str(i): "x" * 6000 for i in range(100)}
    assert _sizes(Request(wide, [], few)) == [(100, 0, 0), (0, 0, 50)], (
        "600 KB leave no room for others"
    )
    many = [Point("a", 1.0, step, 0) for step in range(1001)]
    assert _sizes(Request({}, many, {})) == [(0, 1000, 0), (0, 1, 0)]
