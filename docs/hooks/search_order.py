"""Let the search of the site show guides before decisions and internals.

Readers search for what to do. A decision names the same words as the guide, and more often. What
must not live here: which pages exist, which `docs/.nav.yml` orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

_FOR_MAINTAINERS = ("adr/", "internals/")
_WEIGHT = 0.1  # of 1, which all other pages have


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Give pages for maintainers less weight than all others."""
    if page.file.src_uri.startswith(_FOR_MAINTAINERS):
        page.meta["search"] = {"boost": _WEIGHT}
    return markdown
