"""Files written atomically: a reader, even after a crash, finds the new version or the old one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write(document: dict[str, Any], path: Path) -> None:
    """Write ``document`` as JSON."""
    write_text(json.dumps(document, indent=1) + "\n", path)


def write_text(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    part.replace(path)
