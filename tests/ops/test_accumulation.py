"""Which of a layer's three products may take the tensor core's shorter accumulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fp8 import Linear, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES


class Products(TorchDispatchMode):
    """Notes which products may accumulate fast."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_mm" in func.name():
            names = [argument.name for argument in func._schema.arguments]
            self.asked.append(args[names.index("fast_accum")])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_only_the_forward_product_is_fast(recipe: str, main_grad: bool) -> None:
    """Transformer Engine's _2X_ACC_FPROP = False, _2X_ACC_DGRAD = _2X_ACC_WGRAD = True."""
    linear = Linear(64, 32, bias=False, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=main_grad)
    if main_grad:
        linear.weight.main_grad = torch.zeros(32, 64)
    x = torch.randn(48, 64, dtype=torch.bfloat16, requires_grad=True)
    with Products() as products:
        with fp8_autocast(fp8_recipe=recipe):
            y = linear(x)
        y.backward(torch.ones_like(y))
    assert products.asked == [True, False, False]
