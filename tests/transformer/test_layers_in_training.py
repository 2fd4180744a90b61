"""TransformerLayers in models: the table, the policy, training under Lightning, checkpointing and torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_fp8 import RotaryPositionEmbedding, TransformerLayer, convert_module, fp8_autocast
from lightning_fp8.modules.base import FP8Module
from tests.small import fp8_trainer
from tests.tiers import thorough

ATTENTION = {"name": "delayed", "fp8_dpa": True}


def layer(**options: Any) -> TransformerLayer:
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_gqa_groups": 2, "normalization": "RMSNorm"}
    return TransformerLayer(32, 48, 4, **{**plain, **options})


class Copies(L.LightningModule):
    """Learns to give its input back."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(**options) for _ in range(4))
        self.rotary = RotaryPositionEmbedding(8)
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x, angles = batch.transpose(0, 1).bfloat16(), self.rotary(batch.shape[1])
        for each in self.layers:
            x = each(x, rotary_pos_emb=angles)
        loss = (x.float() - batch.transpose(0, 1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 3e-3)


LINEARS = ("self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp.fc1", "layernorm_mlp.fc2")


@pytest.mark.parametrize("recipe", [ATTENTION, "mxfp8"])
def test_the_table_says_what_ran(recipe: Any) -> None:
    trainer, model = fp8_trainer(recipe, max_epochs=4), Copies()
    trainer.fit(model, DataLoader(torch.randn(16, 6, 32), 4))
    assert model.losses[-1] < 0.5 * model.losses[0]
    summary = trainer.precision_plugin.summary
    in_fp8 = {row.name: row.precision == "FP8" for row in summary.layers}
    attention = ["self_attention.core_attention"] if recipe == ATTENTION else []
    expected = {f"layers.{index}.{name}": index in (1, 2) for index in range(4) for name in [*LINEARS, *attention]}
    assert in_fp8 == expected
    assert all(row.ran == expected[row.name] or row.ran is None for row in summary.layers)
    assert not summary.idle


def test_the_first_and_last_layer_of_each_tower_stay_in_bf16() -> None:
    model = nn.ModuleDict(
        {"encoder": nn.ModuleList(layer() for _ in range(3)), "decoder": nn.ModuleList(layer() for _ in range(3))}
    )
    convert_module(model)
    for name, module in model.named_modules():
        if isinstance(module, FP8Module):
            assert module.fp8 == name.startswith(("encoder.1", "decoder.1")), name


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_activation_checkpointing_repeats_the_layer(use_reentrant: bool, dropout: float) -> None:
    options = {"hidden_dropout": dropout, "attention_dropout": dropout, "drop_path_rate": dropout}
    x, angles = torch.randn(9, 2, 32), RotaryPositionEmbedding(8)(9)
    found = []
    for checkpointed in (False, True):
        torch.manual_seed(1)
        one, given = layer(**options), x.clone().requires_grad_()
        forward = partial(one, rotary_pos_emb=angles)
        with fp8_autocast(fp8_recipe=ATTENTION):
            y = checkpoint(forward, given, use_reentrant=use_reentrant) if checkpointed else forward(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in one.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*found))


@thorough
@pytest.mark.skipif(torch.__version__.startswith("2.8."), reason="Dynamo of 2.8 cannot trace a NamedTuple made anew")
def test_a_compiled_layer_is_the_layer() -> None:
    one = layer(layer_type="decoder")
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    call = {"rotary_pos_emb": RotaryPositionEmbedding(8)(9), "encoder_output": torch.randn(7, 2, 32)}
    x, found = torch.randn(9, 2, 32), []
    for each in (one, compiled):
        one.zero_grad()
        with fp8_autocast(fp8_recipe={"name": "tensorwise", "fp8_dpa": True}):
            y = each(x, **call)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in one.parameters())])
    for eager, other in zip(*found):
        torch.testing.assert_close(other, eager, rtol=1e-4, atol=1e-5)


def test_gradients_of_weights_go_to_main_grad() -> None:
    fused, x = layer(fuse_qkv_params=True, fuse_wgrad_accumulation=True), torch.randn(9, 2, 32)
    plain = layer(fuse_qkv_params=True)
    plain.load_state_dict(fused.state_dict())
    matrices = [name for name, p in fused.named_parameters() if p.dim() == 2]
    for name in matrices:
        parameter = fused.get_parameter(name)
        parameter.main_grad = torch.zeros_like(parameter)
    for one in (fused, plain):
        with fp8_autocast(fp8_recipe="tensorwise"):
            one(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        own = fused.get_parameter(name)
        assert torch.equal(own.main_grad if name in matrices else own.grad, parameter.grad), name


def test_micro_batches_share_the_cast_weights() -> None:
    one, x = layer(layer_type="decoder"), torch.randn(2, 9, 2, 32)
    with fp8_autocast(fp8_recipe="tensorwise"), torch.no_grad():
        plain = [one(each, encoder_output=each) for each in x]
        first = one(x[0], encoder_output=x[0], is_first_microbatch=True)
        for parameter in one.parameters():
            parameter.detach().data.mul_(2)  # leaves no trace: what is cast stays
        norms = [p for name, p in one.named_parameters() if p.dim() < 2]
        for parameter in norms:
            parameter.data.div_(2)
        second = one(x[1], encoder_output=x[1], is_first_microbatch=False)
    assert torch.equal(first, plain[0])
    assert torch.equal(second, plain[1])


def test_under_torch_autocast() -> None:
    one, x = layer(), torch.randn(9, 2, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(fp8_recipe="tensorwise"):
        y = one(x, rotary_pos_emb=RotaryPositionEmbedding(8)(9))
    y.float().sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(y.float(), one(x, rotary_pos_emb=RotaryPositionEmbedding(8)(9)), rtol=0.1, atol=0.1)
