"""A fused module's step, and what a test reads of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import LayerNormLinear, LayerNormMLP, fp8_autocast, fp8_state_dict
from tests.modules.fused.cases import (
    Fused,
    sample,
)

MODULES = pytest.mark.parametrize("make", [LayerNormLinear, LayerNormMLP])
Make = Callable[..., Any]


def run(module: Fused, x: Tensor, first: bool | None = None, recipe: Any = "delayed", **context: Any) -> list[Tensor]:
    """Outputs and gradients, from gradients that are the same every time."""
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    module.zero_grad()
    with fp8_autocast(fp8_recipe=recipe, **context):
        outputs = module(leaf, is_first_microbatch=first)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    generator = torch.Generator().manual_seed(3)
    along = [torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y.dtype) for y in outputs]
    torch.autograd.backward(outputs, along)
    grads = [leaf.grad, *(p.grad for p in module.parameters())]
    return [*(y.detach() for y in outputs), *(grad.clone() for grad in grads if grad is not None)]


def all_equal(found: list[Tensor], right: list[Tensor]) -> bool:
    return len(found) == len(right) and all(torch.equal(a, b) for a, b in zip(found, right))


def input_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return sample(*shape, dtype=dtype).requires_grad_()


# --- Delayed scaling --------------------------------------------------------------------------------------------------


def amaxes(module: nn.Module) -> dict[str, float]:
    state = fp8_state_dict(module)
    return dict(zip(state["names"], state["seen"].tolist()))
