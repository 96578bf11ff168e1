"""The report: what is counted and written into the page. How it looks: `test_report_page.py`."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from sweeps.ledger_view import TrialSummary
from sweeps.report_figures import rungs, survival
from sweeps.report_page import Section, page, table
from sweeps.spec import SweepSpec, parse_spec

EARLY = "early_stopping: {scheduler: asha, grace_epochs: 2, reduction: 3}"


def _spec(more: str = "") -> SweepSpec:
    return parse_spec(
        "name: x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 9\nbudget: {epochs: 20}\n"
        f"space: {{train.optimizer.lr: {{loguniform: [0.001, 0.1]}}}}\n{more}",
        "x.yaml",
    )


def _trial(number: int, state: str, epoch: int) -> TrialSummary:
    return TrialSummary(number=number, state=state, params={}, value=None, epoch=epoch)


def test_rungs_are_where_early_stopping_decides() -> None:
    assert rungs(_spec(EARLY)) == [2, 6, 18, 20]
    assert rungs(_spec()) == [20]


def test_each_trial_that_reached_a_rung_has_one_fate_there() -> None:
    ends = [("complete", 20), ("pruned", 2), ("pruned", 6), ("failed", 7), ("running", 1)]
    trials = [_trial(number, *end) for number, end in enumerate(ends)]
    counts = survival(_spec(EARLY), trials)
    assert counts == {
        "went on": [3, 1, 1, 0],
        "pruned": [1, 1, 0, 0],
        "failed": [0, 1, 0, 0],
        "complete": [0, 0, 0, 1],
    }


class _Requests(HTMLParser):
    """Every address that a page would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]


def test_the_page_loads_nothing_from_anywhere_and_shows_text_as_text() -> None:
    evil = "<img src=http://example.com/x>"
    text = page(evil, [evil], [Section(evil, evil, table([evil], [[evil]]))])
    seen = _Requests()
    shown = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    seen.feed(shown)
    assert [one for one in seen.found if not one.startswith("a href=#")] == []
    assert evil not in shown
    assert "&lt;img src=" in shown
    assert "default-src 'none'" in text
