"""A layer's share of a step's FLOPs, against what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_fp8 import convert_module, fp8_autocast
from lightning_fp8.convert.conversion import apply_conversion, plan_conversion
from lightning_fp8.convert.first_step import FirstStep
from lightning_fp8.convert.policy import Policy
from tests.convert.first_step.watched import Attends, Checkpointed, Mixed, decision, normed


@pytest.mark.parametrize("frozen", [False, True])
def test_flops_are_those_that_torch_counts(frozen: bool) -> None:
    """Torch counts a model in float32."""
    model, x = Mixed(), torch.randn(2, 3, 8, 8)
    if frozen:
        model.requires_grad_(False)
        model.blocks[2].requires_grad_(True)
        model.reader.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    convert_module(model, first_last_layers_bf16=False)
    watched = FirstStep(model, plan_conversion(model, Policy(first_last_layers_bf16=False)))
    with fp8_autocast(fp8_recipe="tensorwise"):
        model(x).backward()
    summary = watched.finish()
    flops = {layer.name: layer.flops for layer in summary.layers}
    assert sum(flops.values()) == counter.get_total_flops()
    if frozen:
        assert flops["patches"] == 2 * 8 * 16 * 48
        assert flops["blocks.1"] == 2 * 8 * 16 * 16
        assert flops["blocks.2"] == 2 * flops["blocks.1"]
        assert flops["blocks.3"] == 2 * flops["blocks.1"]
    else:
        in_fp8 = 2 * 8 * 16 * 16 * 3 * 4
        assert summary.share_of_flops == in_fp8 / sum(flops.values())
    assert f"{100 * summary.share_of_flops:.3g} % of a step's FLOPs with them" in str(summary)


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (nn.Sequential(nn.ConvTranspose2d(4, 8, 4, stride=4)), (5, 4, 2, 3), 3 * 2 * 5 * 2 * 3 * 4 * 8 * 16),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1)), (3, 7, 5), 3 * 2 * 7 * 5 * 8 * 27),
        (Attends(), (2, 3, 16), 3 * 2 * 2 * 256 * (3 + 5 + 5 + 3)),
        (nn.Sequential(normed()), (4, 16), 3 * 2 * 4 * 256),
        (Checkpointed(nn.Linear(16, 16), nn.Linear(16, 16)), (4, 16), 2 * 3 * 2 * 4 * 256),
    ],
)
def test_flops_of_unusual_shapes(module: nn.Module, shape: tuple[int, ...], expected: int) -> None:
    """A product forward and two backward, by hand."""
    summary = plan_conversion(module, Policy(first_last_layers_bf16=False))
    apply_conversion(module, summary)
    watched = FirstStep(module, summary)
    with fp8_autocast(fp8_recipe="tensorwise"):
        module(torch.randn(shape, requires_grad=True)).sum().backward()
    assert sum(layer.flops for layer in watched.finish().layers) == expected


def test_flops_are_unknown_where_rows_cannot_be_counted() -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.mix = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 8))

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.fc(batch["x"]) @ self.mix

    model = Hidden()
    plan = plan_conversion(model, Policy(first_last_layers_bf16=False))
    apply_conversion(model, plan)
    watched = FirstStep(model, plan)
    with fp8_autocast(fp8_recipe="tensorwise"):
        model({"x": torch.randn(4, 16)}).sum().backward()
    summary = watched.finish()
    assert decision(summary, "mix").flops is None
    assert summary.share_of_flops is None
