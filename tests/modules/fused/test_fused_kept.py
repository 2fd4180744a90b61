"""LayerNormLinear and LayerNormMLP: what they keep, recomputation, compilers, copies, derivatives."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_fp8 import LayerNormLinear, LayerNormMLP, fp8_autocast
from tests.modules.fused.cases import (
    Fused,
    randomized,
)
from tests.modules.fused.runs import MODULES, Make, all_equal, amaxes, input_of, run
from tests.tiers import thorough

# --- What is kept, and recomputed -------------------------------------------------------------------------------------


def kept_bytes(module: Fused, x: Tensor, enabled: bool = True) -> int:
    """Memory that the backward pass holds beside parameters."""
    own = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            storages[storage._cdata] = tensor.numel() * tensor.element_size()
        return tensor

    with fp8_autocast(enabled=enabled, fp8_recipe="tensorwise"):
        module(x)  # may compile casts, and Inductor's first compilation runs models of its own
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            module(x)
    return sum(storages.values())


def test_only_the_least_is_kept() -> None:
    """The input, two statistics of a row, FP8 copies with a scale each, and the first layer's output."""
    x = input_of(64, 32, dtype=torch.bfloat16)
    norm = 64 * 32 * 2 + 64 * 2 * 4
    assert kept_bytes(LayerNormLinear(32, 48, params_dtype=torch.bfloat16), x) == norm + 64 * 32 + 4
    operands = 64 * 32 + 4 + 64 * 48 + 4
    mlp = LayerNormMLP(32, 48, activation="swiglu", params_dtype=torch.bfloat16)
    assert kept_bytes(mlp, x) == norm + operands + 64 * 96 * 2
    assert kept_bytes(mlp, x, enabled=False) > kept_bytes(mlp, x)
    mlp.checkpoint = True
    assert kept_bytes(mlp, x) == 64 * 32 * 2
    assert kept_bytes(mlp, x, enabled=False) <= 64 * 32 * 2


@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_checkpoint_argument_changes_no_bit(activation: str) -> None:
    module, x = randomized(LayerNormMLP(32, 48, activation=activation)), input_of(20, 32)
    twin = copy.deepcopy(module)
    twin.checkpoint = True
    for calibrating in (False, False, True):
        how = {"enabled": not calibrating, "calibrating": calibrating}
        found, seen = run(twin, x, **how), amaxes(twin)
        assert all_equal(found, run(module, x, **how))
        assert seen == amaxes(module)
    assert all_equal(run(twin, x, enabled=False), run(module, x, enabled=False))


@MODULES
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(make: Make, use_reentrant: bool) -> None:
    module, x = randomized(make(32, 48)), input_of(20, 32)
    right, seen = run(module, x), amaxes(module)
    twin = make(32, 48)
    twin.load_state_dict(module.state_dict())
    forward = twin.forward
    twin.forward = lambda x, **_: checkpoint(forward, x, use_reentrant=use_reentrant)  # type: ignore[method-assign]
    assert all_equal(run(twin, x), right)
    assert amaxes(twin) == seen


# --- Compilers, copies, derivatives -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = LayerNormLinear(32, 32, normalization="RMSNorm", return_layernorm_output=True)
        self.mlp = LayerNormMLP(32, 48, activation="swiglu")

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None) -> Tensor:
        y, normalized = self.qkv(x)
        return normalized + self.mlp(x + y)


@pytest.mark.parametrize("recipe", [pytest.param("delayed", marks=thorough), "mxfp8"])
def test_a_block_compiles_as_it_runs(recipe: str) -> None:
    torch._dynamo.reset()
    block, x = randomized(Block()), input_of(20, 32)
    compiled = copy.deepcopy(block)
    compiled.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        found, seen = run(compiled, x, recipe=recipe), amaxes(compiled)
        assert all_equal(found, run(block, x, recipe=recipe))
        assert seen == amaxes(block)
    torch._dynamo.reset()


@pytest.mark.parametrize("recompute", [False, True])
def test_fully_sharded_modules(recompute: bool, one_rank: DeviceMesh) -> None:
    block, x = randomized(Block()), input_of(20, 32)
    block.mlp.checkpoint = recompute
    sharded = copy.deepcopy(block)
    for module in (sharded.qkv, sharded.mlp, sharded):
        fully_shard(module, mesh=one_rank)
    for _ in range(2):
        found, seen = run(sharded, x), amaxes(sharded)
        whole = [value.full_tensor() if isinstance(value, DTensor) else value for value in found]
        assert all_equal(whole, run(block, x))
        assert seen == amaxes(block)


@MODULES
def test_copies_have_rows_of_their_own(make: Make) -> None:
    module, x = randomized(make(32, 48)), input_of(4, 32)
    right = run(module, x)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert twin.history is not module.history
        assert all_equal(run(twin, x), right)
        assert twin in twin.history.modules.values()


@MODULES
def test_second_derivatives_are_refused(make: Make) -> None:
    module, x = make(32, 48), input_of(4, 32)
    with fp8_autocast():
        y = module(x)
    with pytest.raises(RuntimeError, match="create_graph=True cannot derive"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    with fp8_autocast(enabled=False):
        (dx,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
    dx.sum().backward()
    assert x.grad is not None
