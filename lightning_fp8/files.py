"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside ``path`` to write a file to. The file replaces ``path`` at the end; after an error it is removed.

    Raises:
        IsADirectoryError: If ``path`` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder; name a file in it", str(target))
    part = target.with_name(f".{target.name}.{os.getpid()}")  # a file of mkstemp is only readable by its owner
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
