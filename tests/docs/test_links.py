"""Links inside the documentation lead somewhere. Links to other sites are not fetched."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT, anchors, links


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    broken = []
    for link in links(page):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_every_page_is_in_the_table_of_contents() -> None:
    """A page that no toctree names is found by nobody."""
    index = (ROOT / "docs/index.md").read_text()
    named = {line.strip() for line in index.splitlines()}
    missing = {page.stem for page in PAGES if page.parent == ROOT / "docs"} - named - {"index"}
    assert not {name for name in missing if not name.startswith(("compare_", "transformer_engine_"))}  # globs


def test_readme_is_a_page_to_read_on_the_first_day() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 160
    assert not [line for line in lines if len(line) > 130]
