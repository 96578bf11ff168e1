"""Reading a sweep's report as a browser shows it.

What must not live here: what it should show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page

from tests.integration.browser import Seen, open_page


@contextmanager
def open_report(file: Path) -> Iterator[Page]:
    """A report with all of its figures drawn; that it asked for nothing and complained of nothing
    has been checked.
    """
    seen = Seen()
    with open_page(file.as_uri(), height=6000, seen=seen) as page:
        page.wait_for_function(
            "() => { const all = [...document.querySelectorAll('.plot')]; "
            "return all.length && all.every(one => one.querySelector('.main-svg')) }"
        )
        page.wait_for_load_state("networkidle")
        assert seen.requests == [file.as_uri()]
        assert seen.complaints == []
        yield page


def traces(page: Page, title: str) -> list[dict[str, Any]]:
    """The traces of a section's figure, as the browser holds them."""
    found: list[dict[str, Any]] = _plot(page, title).evaluate(
        "plot => plot._fullData.map(t => ({name: t.name, type: t.type, text: t.text, "
        "mode: t.mode, x: Array.from(t.x || []), y: Array.from(t.y || []), "
        "up: Array.from(t.error_x?.array || [])}))"
    )
    return found


def named(page: Page, title: str) -> dict[str, dict[str, Any]]:
    """The same by their names."""
    return {trace["name"]: trace for trace in traces(page, title)}


def colours(page: Page, title: str) -> dict[str, set[str]]:
    """By the names of a section's traces, the colours in which the browser has painted each one's
    lines and points.
    """
    painted = (
        _plot(page, title)
        .locator(".scatterlayer .trace")
        .evaluate_all(
            "traces => traces.map(one => ["
            "...[...one.querySelectorAll('.js-line')].map(line => getComputedStyle(line).stroke), "
            "...[...one.querySelectorAll('.point')].map(dot => getComputedStyle(dot).fill)])"
        )
    )
    names = [trace["name"] for trace in traces(page, title)]
    return {name: set(found) for name, found in zip(names, painted, strict=True)}


def axes(page: Page, title: str) -> list[tuple[str, str, str]]:
    """Each axis of a section's figure: `x` or `y`, its title or nothing, and `log` or `linear`."""
    found = _plot(page, title).evaluate(
        "plot => Object.entries(plot._fullLayout).filter(([k]) => /^[xy]axis\\d*$/.test(k))"
        ".map(([k, a]) => [k[0], plot.layout[k]?.title?.text ?? '', a.type])"
    )
    return [(letter, text, kind) for letter, text, kind in found]


def _plot(page: Page, title: str) -> Locator:
    return section(page, title).locator(".js-plotly-plot")


def section(page: Page, title: str) -> Locator:
    """The section that a link leads to, by the beginning of the link's text."""
    return page.locator(f"section[id^='{title.lower().replace(' ', '-')}']")
