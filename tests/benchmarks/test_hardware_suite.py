"""Suite ``hardware``: its kernels do what they say. None of these tests measures time."""

from __future__ import annotations

import pytest
import torch

from benchmarks.hardware_kernels import CHAIN, copy_rate_kernel, product_rate_kernel
from cuda_kernels.host.launch import Launch
from cuda_kernels.host.tensor_maps import Box, map_on
from tests.cuda_kernels.emulated import Emulator, executing, needs_compilers

CPU = torch.device("cpu")


@needs_compilers
@pytest.mark.parametrize(("n", "from_registers"), [(64, True), (64, False)])
def test_products_are_all_computed(n: int, from_registers: bool) -> None:
    out = torch.zeros(1, 256)
    with executing(Emulator()):
        Launch(product_rate_kernel(n, from_registers), 1, (3,), CPU).start(out)
    assert (out == 3 * CHAIN * n // 4).all()  # a thread has a quarter of a row


@needs_compilers
@pytest.mark.parametrize("add", [False, True])
def test_copies_reach_their_place(add: bool) -> None:
    out = torch.ones(2 * 128, 64)
    with executing(Emulator()):
        Launch(copy_rate_kernel(add), 2, (5,), CPU).start(map_on(CPU, Box(128, 64, swizzle=False))(out))
    assert (out == float(add)).all()
