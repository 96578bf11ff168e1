"""Links between documents: each relative link leads to a file, and each anchor to a heading.

What must not live here: links from the pages below `docs/` to generated pages, which `make docs`
checks, and addresses on the network, which nothing here asks.
"""

from __future__ import annotations

import functools
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown import Markdown
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docker").rglob("*.md")),
    *sorted(DOCS.rglob("*.md")),
]
GENERATED = {
    DOCS / path
    for path in re.findall(
        r'"(reference/[\w-]+\.md)":', (DOCS / "hooks/reference.py").read_text(encoding="utf-8")
    )
}
"""Pages that exist only while the site is built."""


class _Page(HTMLParser):
    """The targets of a page's links, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        target = found.get("src" if tag == "img" else "href")
        if target:
            self.targets.add(target)


@functools.cache
def _read(document: Path) -> _Page:
    """Render a document as GitHub does, with the same anchors of headings."""
    render = Markdown(
        extensions=["toc", "tables", "md_in_html", "pymdownx.superfences"],
        extension_configs={"toc": {"slugify": slugify(case="lower")}},
    )
    page = _Page()
    page.feed(render.convert(document.read_text(encoding="utf-8")))
    return page


def _broken(document: Path) -> list[str]:
    """Return the targets in a document that lead nowhere."""
    broken = []
    for target in _read(document).targets:
        link = urlsplit(target)
        if link.scheme or link.netloc:
            continue
        file = (document.parent / unquote(link.path)).resolve() if link.path else document
        if file in GENERATED:
            continue
        missing = link.fragment and file.suffix == ".md" and file.is_file()
        if not file.exists() or (missing and link.fragment not in _read(file).anchors):
            broken.append(target)
    return sorted(broken)


def test_links_lead_somewhere() -> None:
    assert len(DOCUMENTS) > 50
    assert {page: broken for page in DOCUMENTS if (broken := _broken(page))} == {}


def test_broken_link_and_anchor_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A heading, with `code`\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md#a-heading-with-code) [b](other.md#no) [c](none.md)\n"
        "[d](#no) ![e](none.png)\n\n"
        "```\n[in a block](none.md)\n```\n"
    )
    assert _broken(page) == ["#no", "none.md", "none.png", "other.md#no"]


def test_generated_pages_are_known() -> None:
    assert len(GENERATED) == 4
