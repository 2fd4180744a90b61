"""The pages of the documentation, README among them: their blocks of code, links and anchors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCED = re.compile(r"^( *)(```+)([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!\!)\[(?:[^\[\]]|\[[^\]]*\])*\]\(([^()\s]+)\)|!\[[^\]]*\]\(([^()\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        page: where it is.
        line: the number of its first line.
        language: what its fence says, ``"python"`` for one; empty without.
        text: without the indentation of its fence.
    """

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, *languages: str) -> list[Block]:
    """Those of ``page`` in one of ``languages``, in order."""
    source = page.read_text()
    found = []
    for match in _FENCED.finditer(source):
        indent, _, language, text = match.groups()
        lines = [line.removeprefix(indent) for line in text.splitlines(keepends=True)]
        found.append(Block(page, source.count("\n", 0, match.start(4)) + 1, language.strip(), "".join(lines)))
    return [block for block in found if block.language in languages]


def prose(page: Path) -> str:
    """``page`` without blocks of code, and without code inside of lines."""
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", _FENCED.sub("", page.read_text()))


def links(page: Path) -> Iterator[str]:
    """The targets of the links and pictures of ``page``."""
    for match in _LINK.finditer(prose(page)):
        yield match[1] or match[2]


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of ``page``, as GitHub and MyST make them."""
    headings = re.findall(r"^#+ +(.+?) *$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
