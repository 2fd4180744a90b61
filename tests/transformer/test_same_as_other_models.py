"""TransformerLayer computes what torch's and transformers' own layers do, with their weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from lightning_fp8 import RotaryPositionEmbedding, TransformerLayer
from tests.transformer.layer_cases import draw

GELU = partial(F.gelu, approximate="tanh")
SELF = {
    "self_attention.layernorm_qkv.weight": "self_attn.in_proj_weight",
    "self_attention.layernorm_qkv.bias": "self_attn.in_proj_bias",
    "self_attention.proj.weight": "self_attn.out_proj.weight",
    "self_attention.proj.bias": "self_attn.out_proj.bias",
    "layernorm_mlp.fc1_weight": "linear1.weight",
    "layernorm_mlp.fc1_bias": "linear1.bias",
    "layernorm_mlp.fc2_weight": "linear2.weight",
    "layernorm_mlp.fc2_bias": "linear2.bias",
}


def norm(ours: str, theirs: str, between: str = ".layer_norm_") -> dict[str, str]:
    return {f"{ours}{between}{leaf}": f"{theirs}.{leaf}" for leaf in ("weight", "bias")}


def ours(layer_type: str = "encoder", **options: object) -> TransformerLayer:
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "no_mask"}
    fused = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    return TransformerLayer(32, 64, 4, layer_type=layer_type, **{**plain, **fused, **options})


def assert_same(layer: nn.Module, other: nn.Module, names: dict[str, str], y: Tensor, z: Tensor, x: Tensor) -> None:
    """Output, and gradients of input and parameters."""
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    dy = torch.randn_like(y)
    own = torch.autograd.grad(y, [x, *(layer.get_parameter(name) for name in names)], dy)
    right = torch.autograd.grad(z, [x, *(other.get_parameter(name) for name in names.values())], dy)
    for name, one, two in zip(["x", *names], own, right):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=2e-5, msg=name)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_of_torch(norm_first: bool) -> None:
    other = nn.TransformerEncoderLayer(32, 4, 64, 0.0, GELU, norm_first=norm_first)
    draw(other)
    names = {**SELF}
    if norm_first:
        layer = ours()
        names |= norm("self_attention.layernorm_qkv", "norm1") | norm("layernorm_mlp", "norm2")
    else:
        layer = ours(output_layernorm=True, apply_residual_connection_post_layernorm=True)
        names = {name.replace("layernorm_qkv", "qkv"): value for name, value in names.items()}
        names |= norm("layernorm_mlp", "norm1") | norm("layernorm", "norm2", ".")
    layer.load_state_dict({name: other.get_parameter(value) for name, value in names.items()})
    x = torch.randn(7, 3, 32, requires_grad=True)
    assert_same(layer, other, names, layer(x), other(x), x)


def test_a_decoder_layer_of_torch() -> None:
    other = nn.TransformerDecoderLayer(32, 4, 64, 0.0, GELU, batch_first=True, norm_first=True)
    draw(other)
    layer = ours("decoder", attn_input_format="bshd", self_attn_mask_type="causal")
    names = {**SELF, **norm("self_attention.layernorm_qkv", "norm1"), **norm("layernorm_mlp", "norm3")}
    names |= norm("inter_attention.layernorm_query", "norm2")
    names |= {f"inter_attention.proj.{leaf}": f"multihead_attn.out_proj.{leaf}" for leaf in ("weight", "bias")}
    state = {name: other.get_parameter(value) for name, value in names.items()}
    for leaf in ("weight", "bias"):
        query, key_value = other.get_parameter(f"multihead_attn.in_proj_{leaf}").split([32, 64])
        state |= {f"inter_attention.layernorm_query.{leaf}": query, f"inter_attention.key_value.{leaf}": key_value}
    layer.load_state_dict(state)
    x, encoder = torch.randn(3, 7, 32, requires_grad=True), torch.randn(3, 5, 32)
    hidden = nn.Transformer.generate_square_subsequent_mask(7)
    assert_same(layer, other, names, layer(x, encoder_output=encoder), other(x, encoder, tgt_mask=hidden), x)


def test_a_llama_layer_of_transformers() -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    other = LlamaDecoderLayer(config, 0)
    draw(other)
    layer = TransformerLayer(
        64,
        96,
        4,
        num_gqa_groups=2,
        layernorm_epsilon=config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        attn_input_format="bshd",
    )
    names = {f"self_attention.layernorm_qkv.{a}_weight": f"self_attn.{a[0]}_proj.weight" for a in ("query", "key")}
    names |= {
        "self_attention.layernorm_qkv.value_weight": "self_attn.v_proj.weight",
        "self_attention.layernorm_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.proj.weight": "self_attn.o_proj.weight",
        "layernorm_mlp.layer_norm_weight": "post_attention_layernorm.weight",
        "layernorm_mlp.fc2_weight": "mlp.down_proj.weight",
    }
    state = {name: other.get_parameter(value) for name, value in names.items()}
    gate_up = torch.cat([other.mlp.gate_proj.weight, other.mlp.up_proj.weight])
    layer.load_state_dict({**state, "layernorm_mlp.fc1_weight": gate_up})
    x = torch.randn(2, 9, 64, requires_grad=True)
    y = layer(x, rotary_pos_emb=RotaryPositionEmbedding(16)(32))
    z = other(x, position_embeddings=LlamaRotaryEmbedding(config)(x, torch.arange(9)[None]))
    assert_same(layer, other, names, y, z[0] if isinstance(z, tuple) else z, x)


@pytest.mark.parametrize(("rows", "divided_by"), [(16, 2.0), (64, 4.0)])
def test_positions_are_interpolated(rows: int, divided_by: float) -> None:
    """By the factor, and beyond what it reaches by as much as is needed."""
    plain = RotaryPositionEmbedding(8)(rows)
    options = {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 16}
    torch.testing.assert_close(RotaryPositionEmbedding(8, **options)(rows), plain / divided_by)


def test_angles_are_exact_in_a_model_of_another_dtype() -> None:
    embedding = RotaryPositionEmbedding(8)
    model = nn.Sequential(embedding, nn.Linear(2, 2)).bfloat16()
    angles = model[0](5000)
    expected = 4999 * 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    torch.testing.assert_close(angles[-1, 0, 0, :4].double(), expected, rtol=1e-6, atol=0)
    assert not any("0." in name for name in model.state_dict())
    model.load_state_dict({**model.state_dict(), "0.inv_freq": torch.ones(4)})  # as Transformer Engine saves
    assert torch.equal(model[0](5000), angles)


def test_rotary_angles_of_a_part_of_the_channels_and_from_a_position_on() -> None:
    frequencies = torch.tensor([1.0, 10.0**-2.0, 10.0**-4.0, 10.0**-6.0])
    embedding = RotaryPositionEmbedding(16, rotary_percent=0.5, rotary_base=1e8)
    angles = embedding(3, offset=2)
    expected = torch.outer(torch.tensor([2.0, 3.0, 4.0]), frequencies)
    torch.testing.assert_close(angles[:, 0, 0], torch.cat([expected, expected], 1))
    interleaved = RotaryPositionEmbedding(16, 0.5, rotary_base=1e8, interleaved=True)(3, 2)[:, 0, 0]
    torch.testing.assert_close(interleaved[:, ::2], expected)
    torch.testing.assert_close(interleaved[:, 1::2], expected)
