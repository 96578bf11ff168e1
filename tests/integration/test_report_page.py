"""The report in a real browser: it loads nothing, and shows the ledger's contents."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Page

from sweeps.artifacts.export import draw_report
from sweeps.errors import NoReport
from sweeps.trust.findings import find
from tests.integration.browser import photograph, require_chromium
from tests.integration.report_reader import axes, colours, named, open_report, traces
from tests.time_limits import scaled
from tests.unit.sweeps.sweep_factory import MadeSweep
from trainable.store.metrics_file import Row

SPACE = (
    "{train.optimizer.lr: {loguniform: [1.0e-4, 1.0e-1]}, "
    "train.schedule.warmup: {uniform: [0.0, 0.3]}, "
    "train.clip.max_norm: {loguniform: [0.1, 10]}}"
)
EARLY = "early_stopping: {scheduler: asha, grace_epochs: 1, reduction: 3}"
LEVELS = (0, 2, 1, 3, 5, 4, 6, 7)
"""How good the complete trials are: not each is better than the one before."""
COMPLETE, PRUNED = len(LEVELS), 24
COMPARED = "val/loss"
SCALES = {"lr": "log", "max_norm": "log", "warmup": "linear"}
RANGES = {"lr": (1e-4, 1e-1), "max_norm": (0.1, 10), "warmup": (0.0, 0.3)}
EVIL = "oom: </script><script>document.title = 'taken over'</script>"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> MadeSweep:
    """Eight complete trials, the last of them the best; 24 pruned ones; one that failed."""
    made = MadeSweep(tmp_path_factory.mktemp("report"), space=SPACE, more=EARLY)
    for number, level in enumerate(LEVELS):
        made.add("complete", *(1.0 - 0.1 * level + 0.5 / epoch for epoch in range(1, 11)))
        made.log(
            number,
            *(
                Row(10 * e, 0, {"train/clip_fraction": number / 10, "epoch": float(e)})
                for e in range(1, 11)
            ),
        )
    for _ in range(PRUNED):
        made.add("pruned", 3.0)
    made.add("failed", 3.2, 3.1, reason=EVIL)
    return made


@pytest.fixture(scope="module")
def page(sweep: MadeSweep) -> Iterator[Page]:
    require_chromium()
    written = draw_report(sweep.paths, sweep.paths.root / "report.html")
    with open_report(written) as page:
        photograph(page, "report-made")
        yield page


@pytest.mark.browser
def test_every_figure_is_drawn(page: Page) -> None:
    assert page.locator("nav a").all_inner_texts() == [
        "Findings",
        "Trials",
        "History",
        "Learning curves",
        "Survival from rung to rung",
        "Importance",
        "Slices",
        "Parallel coordinates",
        "Contours",
        "Clipping",
        "Timeline",
        "Audit",
        "Failures",
    ]
    headings = page.locator("h2").all_inner_texts()
    assert len(headings) == 13
    assert sum(heading.endswith("?") for heading in headings) == 9, "each figure asks a question"
    assert page.locator(".missing").count() == 0
    assert page.locator(".js-plotly-plot").count() == 9
    assert page.title() == "small"


@pytest.mark.browser
@pytest.mark.parametrize("width", [1400, 800])
def test_tools_of_a_figure_lie_above_its_legend(page: Page, width: int) -> None:
    before = page.viewport_size
    page.set_viewport_size({"width": width, "height": 900})
    for plot in page.locator(".js-plotly-plot").all():
        plot.hover()
        figure, tools = plot.bounding_box(), plot.locator(".modebar").bounding_box()
        assert figure is not None
        assert tools is not None
        assert tools["height"] > 0
        assert tools["y"] + tools["height"] <= figure["y"]
    if before is not None:
        page.set_viewport_size(before)


@pytest.mark.browser
def test_texts_and_tables_describe_the_sweep(page: Page) -> None:
    text = page.locator("header").inner_text()
    assert "33 of 33 trials: 8 complete, 24 pruned, 1 failed" in text
    assert "best: trial 7 with val/loss 0.35 (lr " in text
    rows = [row.split("\t") for row in page.locator("#trials tr").all_inner_texts()[1:]]
    assert len(rows) == COMPLETE + PRUNED + 1
    assert rows[0][:4] == ["7", "complete", "0.35", "10"]
    assert [row[1] for row in rows] == ["complete"] * COMPLETE + ["pruned"] * PRUNED + ["failed"]
    assert page.locator("#failures td").nth(1).inner_text() == EVIL


@pytest.mark.browser
def test_history_ends_at_the_best(page: Page, sweep: MadeSweep) -> None:
    traces = named(page, "History")
    values = [record.value for record in sweep.view.records[: COMPLETE + PRUNED]]
    best_so_far = list(accumulate(values, min))
    assert best_so_far[:COMPLETE] != values[:COMPLETE], "each was better than the one before"
    for name, first, wanted in (
        ("complete", 0, values[:COMPLETE]),
        ("pruned", COMPLETE, values[COMPLETE:]),
        ("best so far", 0, best_so_far),
    ):
        assert traces[name]["x"] == list(range(first, first + len(wanted)))
        assert traces[name]["y"] == pytest.approx(wanted)


@pytest.mark.browser
def test_curves_are_coloured_by_state(page: Page) -> None:
    traces = named(page, "Learning curves")
    assert set(traces) == {"complete", "pruned", "failed", "best"}
    # each curve ends with a gap before the next one
    assert len(traces["complete"]["y"]) == COMPLETE * (10 + 1)
    assert len(traces["pruned"]["y"]) == PRUNED * (1 + 1)
    assert len(traces["failed"]["y"]) == 2 + 1
    assert set(traces["best"]["text"]) == {"trial 7"}
    painted = colours(page, "Learning curves")
    assert painted["best"] == {"rgb(0, 0, 0)"}
    assert [len(each) for each in painted.values()] == [1] * len(traces)
    assert len(set.union(*painted.values())) == len(traces), "two states in one colour"


@pytest.mark.browser
def test_parallel_coordinates_have_one_axis_per_parameter(page: Page, sweep: MadeSweep) -> None:
    found = page.locator("#parallel-coordinates .js-plotly-plot").evaluate(
        "plot => plot._fullData[0].dimensions.map(one => [one.label, "
        "Array.from(one.values), Array.from(one.range), one.ticktext || []])"
    )
    axes = {label: parts for label, *parts in found}
    assert list(axes) == [COMPARED, *(name for name in axes if name in SCALES), "trial"]
    assert set(axes) == {COMPARED, *SCALES, "trial"}
    numbers = axes["trial"][0]
    assert sorted(numbers) == list(range(COMPLETE + PRUNED))
    assert numbers[-1] == 7, "the best one is on top"
    for name, scale in SCALES.items():
        values, shown, ticks = axes[name]
        params = {
            record.number: value
            for record in sweep.view.records
            for key, value in record.params.items()
            if key.endswith(name)
        }
        scaled = math.log10 if scale == "log" else float
        assert values == pytest.approx([scaled(params[number]) for number in numbers])
        assert shown == pytest.approx(list(map(scaled, RANGES[name])))
        assert bool(ticks) == (scale == "log")


@pytest.mark.chaos
@pytest.mark.browser
def test_parallel_coordinates_are_painted_and_can_be_brushed(page: Page) -> None:
    plot = page.locator("#parallel-coordinates .js-plotly-plot")
    plot.scroll_into_view_if_needed()
    axis = plot.locator(".axis-brush, .brush-rect, .axis-overlays").nth(1).bounding_box()
    assert axis is not None
    picture = Image.open(io.BytesIO(plot.screenshot())).convert("RGB")
    painted = {pixel for _, pixel in picture.getcolors(picture.width * picture.height) or []}
    assert any(red - blue > 80 for red, _, blue in painted), "the best is orange"
    assert any(blue - red > 60 for red, _, blue in painted), "others are blue"
    x, y = axis["x"] + axis["width"] / 2, axis["y"] + axis["height"]
    page.mouse.move(x, y - 0.7 * axis["height"])
    page.mouse.down()
    page.mouse.move(x, y - 0.9 * axis["height"], steps=5)
    page.mouse.up()
    page.wait_for_function(
        "() => document.querySelector('#parallel-coordinates .js-plotly-plot')"
        "._fullData[0].dimensions.some(one => one.constraintrange)",
        timeout=scaled(10_000),
    )


@pytest.mark.browser
def test_slices_use_the_searched_scales(page: Page) -> None:
    found = axes(page, "Slices")
    assert {text: kind for letter, text, kind in found if letter == "x"} == SCALES
    assert {text for letter, text, _ in found if letter == "y"} == {COMPARED, ""}
    dots = [trace for trace in traces(page, "Slices") if trace["mode"] == "markers"]
    assert [len(trace["x"]) for trace in dots] == [COMPLETE + PRUNED] * 3


@pytest.mark.browser
def test_findings_open_the_page(page: Page, sweep: MadeSweep) -> None:
    found = find(sweep.view)
    assert page.locator("#findings li").all_inner_texts() == [f.sentence for f in found.sentences]
    assert {"best", "epochs", "failures"} <= {one.topic for one in found.sentences}
    (further, *_) = page.locator("#findings code").all_inner_texts()
    assert f"-s {found.overrides[0]}" in further
    assert page.locator("section").first.get_attribute("id") == "findings"


@pytest.mark.chaos
@pytest.mark.browser
def test_page_fits_a_phone(page: Page) -> None:
    seen = page.viewport_size
    assert seen is not None
    page.set_viewport_size({"width": 420, "height": seen["height"]})
    try:
        # The figures follow a moment later.
        page.wait_for_function(
            "document.documentElement.scrollWidth === 420", timeout=scaled(30_000)
        )
    finally:
        page.set_viewport_size(seen)


def test_unfinished_sweep_report_names_what_is_missing(tmp_path: Path) -> None:
    sweep = MadeSweep(tmp_path)
    sweep.add("complete", 0.5, 0.4)
    sweep.add("failed", reason=EVIL)
    written = draw_report(sweep.paths, tmp_path / "report.html").read_text()
    assert "2 of 3 trials: 1 complete, 1 failed" in written
    assert "<h2>Not drawn</h2>" in written
    assert "it needs 2 trials with a value, and there are 1" in written
    assert "train.clip.max_norm was not searched" in written
    assert "this sweep stops no trial early" in written
    assert EVIL not in written


def test_unwritable_report_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file where the directory should be")
    with pytest.raises(NoReport, match=r"taken/report.html cannot be written \(Not a directory\)"):
        draw_report(MadeSweep(tmp_path).paths, tmp_path / "taken" / "report.html")
