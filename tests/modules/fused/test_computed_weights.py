"""Weights that a parametrization computes anew each time they are read, and may compute otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lightning_fp8 import LayerNormLinear, LayerNormMLP, fp8_autocast


class Counted(nn.Module):
    """Twice, four times, ... the weight."""

    reads = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.reads += 1
        return weight * 2.0**self.reads


WEIGHTS = {"linear": ["weight"], "mlp": ["fc1_weight", "fc2_weight"]}


@pytest.mark.parametrize("run", ["recomputed", "fp8", "fp8, kept"])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_forward_and_its_backward_read_a_weight_once(kind: str, run: str) -> None:
    torch.manual_seed(0)
    module = LayerNormLinear(16, 16) if kind == "linear" else LayerNormMLP(16, 16, checkpoint=run == "recomputed")
    plain = LayerNormLinear(16, 16) if kind == "linear" else LayerNormMLP(16, 16)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        for name in WEIGHTS[kind]:
            getattr(plain, name).mul_(2)
            parametrize.register_parametrization(module, name, Counted(), unsafe=True)
            module.parametrizations[name][0].reads = 0
    x, found = torch.randn(5, 16), []
    first = True if run == "fp8, kept" else None
    for one in (module, plain):
        given = x.clone().requires_grad_()
        with fp8_autocast(enabled=run != "recomputed", fp8_recipe="tensorwise"):
            y = one(given, is_first_microbatch=first)
        y.square().sum().backward()
        found.append([y, given.grad])
    assert [module.parametrizations[name][0].reads for name in WEIGHTS[kind]] == [1] * len(WEIGHTS[kind])
    assert all(torch.equal(*pair) for pair in zip(*found))
    for name in WEIGHTS[kind]:
        assert torch.equal(module.parametrizations[name].original.grad, 2 * getattr(plain, name).grad)
