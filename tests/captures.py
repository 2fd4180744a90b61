"""A planted flag: torch says that a CUDA graph is being captured; and a mode in which the host reads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def capture(*_: Any) -> Iterator[None]:
    """What torch says inside ``torch.cuda.graph``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "is_initialized", lambda: True)
        patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        yield


class NothingIsRead(TorchDispatchMode):
    """Raises where an op outside the kernels reads a tensor on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero"), name
        return func(*args, **(kwargs or {}))
