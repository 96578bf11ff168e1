"""README and the guides list all that a task, its data and a context offer."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.golden.offers import BEGIN, END, PAGES, public_names, with_tables
from trainable import Context, Data, Task

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", PAGES)
def test_guide_has_the_tables_of_the_docstrings(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1
    made = with_tables(text, PAGES[page]())
    if os.environ.get("UPDATE_GOLDEN") == "1":
        (ROOT / page).write_text(made, encoding="utf-8")
    assert text == made or os.environ.get("UPDATE_GOLDEN") == "1"


@pytest.mark.parametrize(
    ("kind", "page"),
    [
        (Task, "docs/guides/own-model.md"),
        (Data, "docs/guides/own-model.md"),
        (Context, "docs/guides/own-loop.md"),
        (Task, "README.md"),
        (Data, "README.md"),
        (Context, "README.md"),
    ],
)
def test_each_public_name_is_listed(kind: type, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    listed = set(re.findall(r"`(?:context\.)?(\w+)[`(=]", text))
    # a method of `Data` is no part of what a user writes
    names = {name for name in public_names(kind) if kind is not Data or name != "collate_of"}
    assert names
    assert names - listed == set()


@pytest.mark.parametrize("page", PAGES)
def test_each_row_says_something(page: str) -> None:
    assert [row for row in PAGES[page]().splitlines() if row.endswith("|  |")] == []
