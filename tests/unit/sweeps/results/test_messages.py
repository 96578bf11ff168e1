"""What commands say that change something, or look before that."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sweeps.exits import NO_SUCCESS
from sweeps.layout import SweepPaths
from sweeps.results import messages
from sweeps.results.sweep_view import Outcome
from sweeps.spec.spec import parse_spec

SPEC = "name: small\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 2\n"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", ""),
        (
            "search: {warm_start: [earlier]}\ntracking: {uri: 'http://127.0.0.1:5000'}\n",
            "  not looked at before a run: search.warm_start, tracking.uri\n",
        ),
    ],
)
def test_a_check_says_what_it_leaves_to_the_run(more: str, said: str) -> None:
    out = io.StringIO()
    messages.left_to_the_run(Console(file=out), parse_spec(SPEC + more, "s.yaml"))
    assert out.getvalue() == said


def test_who_cannot_have_more_trials_is_not_told_to_ask_for_them(tmp_path: Path) -> None:
    failed = Outcome(NO_SUCCESS, [], 4, pending=0, cause="none", most_trials=4)
    for outcome, last in (
        (failed, "run FILE --name NAME\n"),
        (replace(failed, num_left=1), "resume small --root .*\n"),
        (replace(failed, most_trials=8), "resume small -s trials=8 --root .*\n"),
    ):
        err = io.StringIO()
        messages.outcome(
            Console(file=io.StringIO()), Console(file=err), outcome, SweepPaths(tmp_path, "small")
        )
        assert re.search(f"{last}$", err.getvalue()), err.getvalue()


def test_pictures_that_are_missing_are_no_trials_that_are(tmp_path: Path) -> None:
    out = io.StringIO()
    ended = Outcome(0, [], 4, pending=0, undrawn=2)
    paths = SweepPaths(tmp_path, "small")
    messages.outcome(Console(file=out), Console(file=io.StringIO()), ended, paths)
    assert re.search(r"^make the pictures of 2 more trials: .* sync small ", out.getvalue(), re.M)
