"""The report: its counts and its page. For its look see `test_report_page.py`."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest

from sweeps.artifacts import export
from sweeps.errors import UserError
from sweeps.ledger.trials import TrialSummary
from sweeps.paths import SweepPaths
from sweeps.report import data, figures
from sweeps.report.data import thinned
from sweeps.report.figures import parallel, rungs, survival
from sweeps.report.report import (
    Cell,
    Header,
    PageSection,
    command_line,
    figure,
    page,
    table,
    write_report,
)
from sweeps.spec.spec import SweepSpec, parse_spec
from sweeps.stopping.halving import bracket_of
from tests.unit.sweeps.sweep_factory import MadeSweep

EARLY = "early_stopping: {scheduler: asha, grace_epochs: 2, reduction: 3}"
MEDIAN = "early_stopping: {scheduler: median, grace_epochs: 2}"
EARLY_HYPERBAND = EARLY.replace("asha", "hyperband")


def _spec(more: str = "") -> SweepSpec:
    return parse_spec(
        "name: x\ntask: digits\nmetric: val/loss\nmode: min\ntrials: 9\nbudget: {epochs: 24}\n"
        f"space: {{train.optimizer.lr: {{loguniform: [0.001, 0.1]}}}}\n{more}",
        "x.yaml",
    )


def _trial(number: int, state: str, epoch: int) -> TrialSummary:
    return TrialSummary(number=number, state=state, params={}, value=None, epoch=epoch)


def test_rungs_are_where_early_stopping_decides() -> None:
    for scheduler in ("asha", "asha_promote", "hyperband"):
        assert rungs(_spec(EARLY.replace("asha", scheduler))) == [2, 6, 18, 24]
    assert rungs(_spec()) == rungs(_spec(MEDIAN)) == []
    for scheduler in ("pbt", "pb2"):
        population = f"early_stopping: {{scheduler: {scheduler}, interval_epochs: 5}}\n"
        assert rungs(_spec(population)) == [5, 10, 15, 20, 24]


def test_each_trial_has_one_outcome_per_reached_rung() -> None:
    ends = [("complete", 24), ("pruned", 2), ("pruned", 6), ("failed", 7), ("running", 1)]
    trials = [_trial(number, *end) for number, end in enumerate(ends)]
    counts = survival(_spec(EARLY), trials)
    assert counts == {
        "continued": [3, 1, 1, 0],
        "pruned": [1, 1, 0, 0],
        "failed": [0, 1, 0, 0],
        "complete": [0, 0, 0, 1],
    }


def test_hyperband_trials_count_at_rungs_of_their_bracket() -> None:
    """One trial for each bracket, all of which were stopped at epoch 6 but for the last one's."""
    spec = _spec(EARLY_HYPERBAND)
    brackets = [bracket_of(number, (2, 6, 18, 24), 3) for number in range(60)]
    trials = [_trial(n, "pruned", 6 if b < 3 else 24) for n, b in enumerate(brackets)]
    shares = [brackets.count(bracket) for bracket in range(4)]
    assert all(shares)
    assert survival(spec, trials) == {
        "continued": [shares[0], 0, 0, 0],
        "pruned": [0, shares[0] + shares[1], 0, shares[3]],
    }


@pytest.mark.parametrize("reports", [200, 201, 1000])
def test_curve_is_drawn_with_few_points_and_both_ends(reports: int) -> None:
    curve = [(epoch, float(epoch)) for epoch in range(1, reports + 1)]
    drawn = thinned(curve)
    assert drawn == curve if reports <= 200 else 100 <= len(drawn) <= 200
    assert (drawn[0], drawn[-1]) == (curve[0], curve[-1])
    assert set(drawn) <= set(curve)


def test_report_names_what_it_omits(tmp_path: Path) -> None:
    """A long curve is cut, a short one is not; the median rule has no rungs to survive."""
    for name, early, reports in (("long", MEDIAN, 201), ("short", EARLY_HYPERBAND, 10)):
        sweep = MadeSweep(tmp_path, name, more=early)
        sweep.add("complete", *(1 / epoch for epoch in range(1, reports + 1)))
        write_report(sweep.paths, tmp_path / f"{name}.html")
    long, short = ((tmp_path / f"{name}.html").read_text() for name in ("long", "short"))
    cut, bracket = "A curve with more than 200 reports (1 here)", "rungs of its own bracket alone"
    none = "Survival from rung to rung: the median rule has no rungs: it decides at the end of"
    assert (cut in long, none in long, bracket in long) == (True, True, False)
    assert (cut in short, none in short, bracket in short) == (False, False, True)
    assert "hyperband runs ASHA in brackets" in short


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        (0, "min of val/loss over 10 epochs; sampler"),
        (12, "min of val/loss over 12 epochs at most (the budget is 10); sampler"),
    ],
)
def test_report_states_no_epochs_that_no_trial_had(
    tmp_path: Path, reports: int, told: str
) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete" if reports else None, *([0.5] * reports))
    write_report(sweep.paths, tmp_path / "report.html")
    assert told in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("earlier", [[], ["report.html"]])
def test_full_disk_names_the_file_and_keeps_the_old_page(
    tmp_path: Path, earlier: list[str]
) -> None:
    sweep, target = MadeSweep(tmp_path), tmp_path / "pages" / "report.html"
    target.parent.mkdir()
    for name in earlier:
        target.with_name(name).write_text("an earlier one")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(OSError, match=rf"^{target} cannot be written \(File too large\); the"):
            write_report(sweep.paths, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [page.name for page in target.parent.iterdir()] == earlier
    assert not earlier or target.read_text() == "an earlier one"


def test_page_follows_links_and_writes_to_devices(tmp_path: Path) -> None:
    sweep, link, pipe = MadeSweep(tmp_path), tmp_path / "link", tmp_path / "pipe"
    (tmp_path / "pages").mkdir()
    link.symlink_to("pages/one.html")
    export.report(sweep.view, link)
    assert link.is_symlink()
    assert [page.name for page in (tmp_path / "pages").iterdir()] == ["one.html"]
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as reader:
        read = reader.submit(pipe.read_text)
        export.report(sweep.view, pipe)
    assert read.result().startswith("<!doctype html>")
    assert pipe.is_fifo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away; run it as root")
def test_link_that_appears_while_the_page_is_drawn_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, target, mine = MadeSweep(tmp_path), tmp_path / "shared/page.html", tmp_path / "mine"
    mine.write_text("mine")
    target.parent.mkdir()
    target.parent.chmod(0o1777)

    def draw(paths: SweepPaths, page: Path) -> Path:
        del paths
        target.symlink_to(mine)
        os.chown(target, 12345, 12345, follow_symlinks=False)
        page.write_text("page")
        return page

    monkeypatch.setattr(export, "draw_report", draw)
    with pytest.raises(UserError, match="is a symbolic link that belongs to user 12345"):
        export.report(sweep.view, target)
    assert mine.read_text() == "mine"


def test_quadratic_figures_use_a_subset_of_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = MadeSweep(tmp_path, "many", more=MEDIAN)
    for number in range(12):
        sweep.add("complete", 1 / (number + 1))
    for most, expected in ((12, set(range(12))), (5, {0, 3, 6, 9, 11})):
        monkeypatch.setattr(figures, "MAX_TRIALS", most)
        (lines,) = parallel(data.read_sweep(sweep.paths)).data
        assert set(lines.dimensions[-1]["values"]) == expected
        write_report(sweep.paths, tmp_path / "many.html")
        told = f"At most {most} of these are used, evenly spaced."
        assert (told in (tmp_path / "many.html").read_text()) == (most == 5)


class _Requests(HTMLParser):
    """Every address that a page would load by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {k}={v}" for k, v in attrs if k in ("src", "href", "srcset")]


def test_page_loads_nothing_and_escapes_text() -> None:
    evil = "<img src=http://example.com/x>"
    cells = table([evil], [[evil, Cell(evil, 1.0)]], sortable=True) + command_line(evil, evil)
    drawn = figure(go.Figure(go.Scatter(y=[1], name="</script><img src=http://example.com/x>")))
    header = Header(evil, "finished", [evil], [evil], None)
    text = page(header, [PageSection(evil, evil, cells + drawn)])
    seen = _Requests()
    shown = re.sub(r"<script nonce=[\w-]+>.*?</script>", "", text, flags=re.DOTALL)
    seen.feed(shown)
    assert [one for one in seen.found if not one.startswith("a href=#")] == []
    assert evil not in shown
    assert "&lt;img src=" in shown
    assert "default-src 'none'" in text
    assert re.search(r"script-src 'nonce-([\w-]+)'.*<script nonce=\1>", text, re.DOTALL)
    assert "connect-src 'none'" in text


NOISY = """
import atexit, runpy, sys
atexit.register(print, "1 leaked type; see https://example.invalid", file=sys.stderr)
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("module", "arguments", "reason"),
    [
        ("trainable.export", ("ROOT/none", "ROOT/weights"), "ROOT/none"),
        ("sweeps.report.report", ("ROOT", "none", "ROOT/page.html"), "none"),
        ("sweeps.artifacts.model_registry", ("ROOT", "small", "0", "m", "pt2"), "checkpoint"),
    ],
)
def test_reason_is_the_last_line(
    tmp_path: Path, module: str, arguments: tuple[str, ...], reason: str
) -> None:
    MadeSweep(tmp_path).add("complete", 1.0)
    given, said = (
        [one.replace("ROOT", str(tmp_path)) for one in words] for words in (arguments, [reason])
    )
    child = subprocess.run(
        [sys.executable, "-c", NOISY, module, *given],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 1
    last = child.stderr.splitlines()[-1]
    assert said[0] in last
    assert "leaked" not in last
