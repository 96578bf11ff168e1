"""Build the report's HTML page, one file without external resources.

Its styles are in `page.css`. `page.js` draws the figures, sorts and filters tables, and updates
the page while `sweep ui` serves it. What must not live here: the page's content (`report`).
"""

from __future__ import annotations

import html
import math
import secrets
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from redaction.escapes import visible

_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src {connect}"
)
"""The browser loads nothing from elsewhere, and runs no script but those of the page itself, even
if a name or a reason contains HTML. Plotly compiles its drawing of lines."""

_FILTER = (
    '<input placeholder="filter, for example: state=complete lr&lt;0.01" aria-label="filter">'
    "<output></output>"
)
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


class Cell(NamedTuple):
    """A cell of a table that is more than its text."""

    text: str
    value: float | None = None
    """The number by which the table is sorted and filtered."""
    link: str | None = None


class Header(NamedTuple):
    """The top of the page."""

    title: str
    state: str
    answer: Sequence[str]
    """The result, one line for each best trial."""
    facts: Sequence[str]
    mlflow: str | None = None
    """The address of MLflow's page; None in a file, which cannot know it and is not live."""


def escape(text: str) -> str:
    """Return a text for HTML, with control characters as visible escapes."""
    return html.escape(visible(text))


def table(
    heads: Sequence[str],
    rows: Sequence[Sequence[str | Cell]],
    classes: Sequence[str] = (),
    *,
    sortable: bool = False,
) -> str:
    """Return an HTML table; `classes` are those of its rows, if they have any.

    A sortable table has a field for a filter above it.
    """
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = "".join(
        f"<tr class='{kind}'>{''.join(map(_cell, row))}</tr>\n"
        for row, kind in zip_longest(rows, classes, fillvalue="")
    )
    parts = f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody>"
    if sortable:
        return f"{_FILTER}<div class=wide><table class=sortable>{parts}</table></div>"
    return f"<div class=wide><table>{parts}</table></div>"


def _cell(cell: str | Cell) -> str:
    text, value, link = cell if isinstance(cell, Cell) else Cell(cell)
    kind = " class=long" if len(text) > _LONG else ""
    number = f' data-value="{value!r}"' if value is not None and math.isfinite(value) else ""
    shown = escape(text) if link is None else f'<a href="{escape(link)}">{escape(text)}</a>'
    return f"<td{kind}{number}>{shown}</td>"


def command_line(label: str, command: str) -> str:
    """Return a command that can be copied."""
    return (
        f"<div class=command><span>{escape(label)}</span><code>{escape(command)}</code>"
        "<button class=copy>copy</button></div>\n"
    )


def figure(drawn: go.Figure) -> str:
    """Return a figure, which the page's script draws."""
    # else the text could end the element that holds it
    data = str(drawn.to_json()).replace("<", "\\u003c")
    return (
        "<div class='wide figure'><div class=plot></div>"
        f"<script type='application/json'>{data}</script></div>"
    )


def page(header: Header, sections: Sequence[PageSection]) -> str:
    """Return the page."""
    body = "\n".join(
        f'<section id="{_anchor(s.title)}"><h2>{escape(s.question or s.title)}</h2>'
        f"{f'<p>{escape(s.sentence)}</p>' if s.sentence else ''}\n{s.body}</section>"
        for s in sections
    )
    nonce = secrets.token_urlsafe(16)
    policy = _POLICY.format(nonce=nonce, connect="'none'" if header.mlflow is None else "'self'")
    style, script = (
        Path(__file__).with_name(name).read_text("utf-8") for name in ("page.css", "page.js")
    )
    scripts = "".join(
        f"<script nonce={nonce}>{one}</script>\n" for one in (get_plotlyjs(), script)
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(header.title)}</title><style>{style}</style>\n{scripts}</head>\n"
        f"<body>{_header(header, sections)}\n<main>{body}</main></body></html>\n"
    )


def _header(header: Header, sections: Sequence[PageSection]) -> str:
    # With blanks between the links, so that the browser can wrap them.
    links = " ".join(f'<a href="#{_anchor(s.title)}">{escape(s.title)}</a>' for s in sections)
    live = ""
    if header.mlflow is not None:
        links = f'<a class=mlflow href="{escape(header.mlflow)}">MLflow</a> {links}'
        live = "<span class=live>live</span>"
    answer = "".join(f"<p class=best>{escape(one)}</p>" for one in header.answer)
    facts = "".join(f"<p>{escape(one)}</p>" for one in header.facts)
    return (
        f"<header><h1>{escape(header.title)}</h1>"
        f"<span class='state {header.state}'>{header.state}</span>{live}"
        f"{answer}{facts}<nav>{links}</nav></header>"
    )


def _anchor(title: str) -> str:
    return escape(title.lower().replace(" ", "-"))
