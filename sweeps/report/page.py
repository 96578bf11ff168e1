"""Build the report's HTML page, one file without external resources.

What must not live here: the page's content (`report`).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from plotly.offline import get_plotlyjs

from redaction.escapes import visible

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2328; margin: 0 auto; max-width: 1200px;
       padding: 24px; }
h1 { font-size: 26px; margin: 0 0 8px; } h2 { font-size: 19px; margin: 40px 0 4px; }
header p { margin: 2px 0; } nav { margin: 16px 0; } nav a { margin-right: 14px; color: #0969da; }
section > p { color: #59636e; max-width: 900px; margin: 0 0 8px; }
section p.missing { color: #9a6700; }
h3 { font-size: 16px; margin: 20px 0 2px; }
ul { margin: 8px 0; padding-left: 22px; } li { margin: 4px 0; max-width: 900px; }
pre { background: #f6f8fa; padding: 10px 14px; margin: 0; font-size: 13px;
      white-space: pre-wrap; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 4px 14px 4px 0; border-bottom: 1px solid #d1d9e0;
         white-space: nowrap; }
td.long { white-space: pre-wrap; }
tr.pass td:first-child { color: #1a7f37; } tr.warn td:first-child { color: #bc4c00; }
tr.pass td:first-child, tr.warn td:first-child { font-weight: 600; }
tr.unknown td { color: #59636e; }
"""
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'unsafe-inline'; img-src data: blob:"
)
"""The browser loads nothing from elsewhere, even if a name or a reason contains HTML."""

_LONG = 24  # cells with more characters are wrapped


class PageSection(NamedTuple):
    """One part of the page."""

    title: str
    """The name of the link to it."""
    sentence: str
    """An explanation, as plain text."""
    body: str
    """HTML."""
    question: str = ""
    """The heading, if it is not the title."""


def escape(text: str) -> str:
    """Return a text for HTML, with control characters as visible escapes."""
    return html.escape(visible(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """Return an HTML table of texts; `classes` are those of its rows, if they have any."""
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(
        f"<tr{f' class={kind}' if kind else ''}>"
        + "".join(f"<td{_kind(cell)}>{escape(cell)}</td>" for cell in row)
        + "</tr>\n"
        for row, kind in zip_longest(rows, classes, fillvalue="")
    )
    return f"<div class=wide><table><tr>{head}</tr>\n{body}</table></div>"


def page(title: str, facts: Sequence[str], sections: Sequence[PageSection]) -> str:
    """Return the page."""
    # With blanks between the links, so that the browser can wrap them.
    links = " ".join(f'<a href="#{_anchor(s.title)}">{escape(s.title)}</a>' for s in sections)
    body = "\n".join(
        f'<section id="{_anchor(s.title)}"><h2>{escape(s.question or s.title)}</h2>'
        f"{f'<p>{escape(s.sentence)}</p>' if s.sentence else ''}\n{s.body}</section>"
        for s in sections
    )
    intro = "".join(f"<p>{escape(fact)}</p>" for fact in facts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
        f"<script>{get_plotlyjs()}</script></head>\n"
        f"<body><header><h1>{escape(title)}</h1>{intro}<nav>{links}</nav></header>\n"
        f"{body}\n</body></html>\n"
    )


def _anchor(title: str) -> str:
    return escape(title.lower().replace(" ", "-"))


def _kind(cell: str) -> str:
    return " class=long" if len(cell) > _LONG else ""
