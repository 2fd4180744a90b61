from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side, one core each

import pytest
import torch

if TYPE_CHECKING:
    from tests.cuda_kernels.emulated import Emulator


@pytest.fixture(autouse=True)
def _reproducible() -> None:
    """No test knows what others drew, or were warned of."""
    from lightning_fp8.modules.attention.arguments import forget_what_was_told

    torch.manual_seed(0)
    forget_what_was_told()


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """The emulator that runs kernels with CPU tensors, as PTX on the CPU."""
    from tests.cuda_kernels.emulated import Emulator, executing

    emulator = Emulator()
    with executing(emulator):
        yield emulator
