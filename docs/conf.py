"""The documentation as a site: ``sphinx-build -W -n docs site``. Nothing is fetched while it is built."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, is_typeddict

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from lightning_fp8.version import __version__  # noqa: E402

project, author, release = "lightning_fp8", "The lightning_fp8 authors", __version__
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"lightning_fp8 {__version__}"

myst_heading_anchors = 4

autodoc_typehints = "none"  # they are in the signatures
autodoc_member_order = "bysource"
autodoc_class_signature = "separated"
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

nitpick_ignore_regex = [(r"py:.*", r"(torch|nn|np|numpy|lightning|collections|typing|transformers|Tensor)\b.*")]
nitpick_ignore = [("py:exc", "MisconfigurationException"), ("py:attr", "reason")]  # Lightning's; set in a forward

LINK_OUT = re.compile(r"\[([^\[\]]+)\]\((\.\./[^()\s]+)\)")
"""A link from a page to a file of the repository that is no page."""


def name_files(app: Any, page: str, source: list[str]) -> None:
    """Give the names of files that the site does not have, in place of links to them."""
    source[0] = LINK_OUT.sub(_name_of_file, source[0])
    if page == "index":  # pages that need not be there
        globs = re.findall(r"^\w+\*$", source[0], flags=re.M)
        for glob in (glob for glob in globs if not [*Path(app.srcdir).glob(f"{glob}.md")]):
            source[0] = source[0].replace(f"{glob}\n", "")


def _name_of_file(link: re.Match[str]) -> str:
    text, target = link[1], link[2].removeprefix("../").partition("#")[0]
    return text if target in text or Path(target).name in text else f"{text} (`{target}`)"


def join_names(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Put the names of arguments that are described together on one line, which is what napoleon reads."""
    text = "\n".join(lines)
    while (joined := re.sub(r"^( +)(\w+(?:, \w+)*),\n\1 +(?=\w+(?:, \w+)*[,:])", r"\1\2, ", text, flags=re.M)) != text:
        text = joined
    if is_typeddict(obj):  # arguments that several functions share
        text = text.replace("Attributes:", "Args:")
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    app.connect("source-read", name_files)
    app.connect("autodoc-process-docstring", join_names, priority=400)  # napoleon's is 500
