"""Rewrite links from pages to files of the repository, such as `../../trainable/step.py`.

Where the repository is browsed, such a link works as it is. In the site it leads to the repository
(`repo_url` in mkdocs.yml), or is plain text where none is set. What must not live here: links
between pages, which MkDocs checks itself.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from markdown import Extension, Markdown
from markdown.treeprocessors import Treeprocessor

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_LOG = logging.getLogger("mkdocs.hooks.repository_links")  # a warning fails a strict build
_BEFORE_MKDOCS_LOOKS = 10  # a larger number comes first; MkDocs checks links at 0


class _Rewriter(Treeprocessor):
    """Rewrites the links of the page that is rendered now."""

    page: Page
    config: MkDocsConfig

    def run(self, root: Element) -> None:
        """Rewrite each link that leaves the directory of pages."""
        for link in root.iter("a"):
            self._rewrite(link)

    def _rewrite(self, link: Element) -> None:
        target = urlsplit(link.get("href", ""))
        if target.scheme or target.netloc or not target.path:
            return
        docs, page = Path(self.config.docs_dir), self.page.file.src_uri
        file = Path(os.path.normpath(docs / Path(page).parent / unquote(target.path)))
        if file.is_relative_to(docs):
            return
        path = os.path.relpath(file, docs.parent)
        if not file.exists():
            _LOG.warning("%s links to %s, which does not exist", page, path)
        if self.config.repo_url:
            link.set("href", f"{self.config.repo_url.rstrip('/')}/blob/main/{path}")
        else:
            link.tag = "span"
            del link.attrib["href"]
            link.set("title", path)


_REWRITER = _Rewriter()


class _RepositoryLinks(Extension):
    """Puts the rewriter into Python-Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Register the rewriter; Python-Markdown calls this."""
        md.treeprocessors.register(_REWRITER, "repository-links", _BEFORE_MKDOCS_LOOKS)


def on_config(config: MkDocsConfig) -> None:
    """Add the extension to those of the site."""
    _REWRITER.config = config
    config.markdown_extensions.append(_RepositoryLinks())  # type: ignore[arg-type]


def on_page_markdown(_: str, page: Page, **__: object) -> None:
    """Remember which page the links belong to."""
    _REWRITER.page = page
