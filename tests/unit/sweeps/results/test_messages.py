"""What commands say that change something, or look before that."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from sweeps.results import messages
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
