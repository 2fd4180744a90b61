"""A planted flag: torch says that a CUDA graph is being captured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch


@contextmanager
def capture(*_: Any) -> Iterator[None]:
    """What torch says inside ``torch.cuda.graph``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield
