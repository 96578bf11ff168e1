"""Reading MLflow's own pages (3.17) as a browser shows them.

What must not live here: what they should show.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page

_CELLS = """() => {
  const rows = {};
  for (const cell of document.querySelectorAll('.ag-row [col-id]')) {
    const number = cell.closest('.ag-row').getAttribute('row-index');
    (rows[number] ??= {})[cell.getAttribute('col-id')] = cell.innerText;
  }
  return rows;
}"""
_CURVES = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(plot =>
  plot.data.filter(t => t.type === 'scatter' && t.x && t.x.length)
    .map(t => [t.name, Array.from(t.x), Array.from(t.y)]))"""


def runs_table(page: Page, columns: dict[str, str]) -> list[dict[str, str]]:
    """The rows of the page of runs, from above, as far as it has drawn them.

    Args:
        columns: MLflow's name of each column to be read, by the key it gets here.
    """
    last = list(columns.values())[-1]
    page.locator(f".ag-row [col-id='{last}']").first.wait_for()
    rows: dict[str, dict[str, str]] = page.evaluate(_CELLS)
    return [
        # of a run's name, its colour is the first line
        {key: rows[number][column].strip().split("\n")[-1] for key, column in columns.items()}
        for number in sorted(rows, key=int)
        if number.isdigit()
    ]


def curves(page: Page) -> list[tuple[str, dict[float, float]]]:
    """What a page's figures draw, as far as they are drawn: a run, and the value at each step."""
    page.locator(".js-plotly-plot .scatterlayer .trace").first.wait_for()
    drawn: list[tuple[str, list[float], list[float]]] = page.evaluate(_CURVES)
    return [(name, dict(zip(x, y, strict=True))) for name, x, y in drawn]


def compared(page: Page) -> dict[str, list[str]]:
    """The tables of the page that compares runs: by the name of the row, a cell for each run."""
    page.get_by_text("Parallel Coordinates Plot").first.wait_for()
    page.locator("table").nth(1).wait_for()
    rows: list[list[Any]] = page.evaluate(
        "() => [...document.querySelectorAll('table tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText.trim()))"
    )
    return {row[0]: row[1:] for row in rows if row}


def parallel_axes(page: Page) -> list[str]:
    """The names of the axes of the page's parallel coordinates, from the left."""
    labels = page.locator("svg .axis .label")
    labels.first.wait_for(state="attached")
    return labels.all_text_contents()
