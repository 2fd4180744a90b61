"""FP8 weights that torch's functions would turn into DTensors of rounded high-precision values: they refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

from lightning_fp8 import LayerNormLinear, Linear, convert_module, fp8_autocast, fp8_model_init
from lightning_fp8.sharding import styles
from lightning_fp8.weights.fp8_tensor import FP8Tensor

REFUSED = "parallelize_module, distribute_module and distribute_tensor do not distribute weights that fp8_model_init"


def _in_fp8(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with fp8_model_init():
        return make()


WAYS: dict[str, Callable[[nn.Module, DeviceMesh], Any]] = {
    **{
        f"{home.__name__.rpartition('.')[2]}.{name}": lambda module, mesh, style=style: parallelize_module(
            module, mesh, style()
        )
        for home in (torch_styles, styles)
        for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel")
        for style in [getattr(home, name)]
    },
    "row with a layout": lambda module, mesh: parallelize_module(
        module, mesh, styles.RowwiseParallel(output_layouts=Shard(1))
    ),
    "distribute_module": distribute_module,
    "distribute_module with a function": lambda module, mesh: distribute_module(
        module, mesh, lambda name, each, mesh: each.register_parameter(
            "weight", nn.Parameter(distribute_tensor(each.weight, mesh, [Shard(0)]))
        ),
    ),
    **{
        f"distribute_tensor {placement}": lambda module, mesh, placement=placement: distribute_tensor(
            module.weight, mesh, [placement]
        )
        for placement in (Shard(0), Shard(1), Replicate())
    },
    "distribute_tensor of its data": lambda module, mesh: distribute_tensor(module.weight.data, mesh, [Shard(0)]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_weights_in_fp8_are_not_distributed(way: str, one_rank: DeviceMesh) -> None:
    layer = _in_fp8(lambda: Linear(32, 16))
    before, codes = dict(vars(layer)), layer.weight.operands.rowwise.data.clone()
    parameters, own = dict(layer.named_parameters()), {key for key in vars(layer) if key != "_parameters"}
    with pytest.raises(NotImplementedError, match=REFUSED):
        WAYS[way](layer, one_rank)
    assert all(found is parameters[name] for name, found in layer.named_parameters())
    assert {key for key in vars(layer) if key != "_parameters"} == own
    assert all(vars(layer)[key] is before[key] for key in own)
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks
    assert torch.equal(layer.weight.operands.rowwise.data.view(torch.uint8), codes.view(torch.uint8))
    with fp8_autocast(fp8_recipe="tensorwise"):
        assert layer(torch.randn(4, 32)).shape == (4, 16)


def test_converted_models_and_fused_layers(one_rank: DeviceMesh) -> None:
    model = _in_fp8(lambda: convert_module(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))))
    kinds = [type(each) for each in model.parameters()]
    assert FP8Tensor in kinds
    with pytest.raises(NotImplementedError, match=REFUSED):
        parallelize_module(model, one_rank, {"1": torch_styles.ColwiseParallel(), "2": torch_styles.RowwiseParallel()})
    assert [type(each) for each in model.parameters()] == kinds
    with pytest.raises(NotImplementedError, match=REFUSED):
        parallelize_module(_in_fp8(lambda: LayerNormLinear(32, 32)), one_rank, torch_styles.SequenceParallel())


def test_other_weights_are_distributed_and_fully_shard_has_its_own_sentence(one_rank: DeviceMesh) -> None:
    model = convert_module(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), first_last_layers_bf16=False)
    plan = {"0": styles.ColwiseParallel(), "1": styles.RowwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, one_rank, plan)
    assert all(isinstance(each, DTensor) for each in model.parameters())
    assert model[1].output_layout == Replicate()
    with fp8_autocast(fp8_recipe="tensorwise"):
        assert model(torch.randn(4, 32)).shape == (4, 32)
    with pytest.raises(NotImplementedError, match="^fully_shard does not shard weights that fp8_model_init keeps"):
        fully_shard(_in_fp8(lambda: Linear(32, 16)), mesh=one_rank)
    weight = _in_fp8(lambda: Linear(32, 16)).weight
    for same in (weight.detach(), nn.Parameter(weight), weight.data, weight.clone()):
        assert isinstance(same, FP8Tensor)
