"""TransformerLayer against its definition in float64: outputs and every gradient, all options in pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fp8 import DotProductAttention, TransformerLayer, fp8_autocast
from lightning_fp8.numerics.recipes import RECIPES
from tests.transformer.layer_cases import CASES, batch_of, exact, layer_of, options_of, ran
from tests.transformer.layer_reference import Options


def measured_by(name: str) -> str:
    """The gradient whose size says what rounding does to that named ``name``: its own, but for a bias of keys.

    That has none: softmax takes no notice of what all scores share. It is a sum of terms as large as those of queries.
    """
    return name.replace("k_norm.bias", "q_norm.bias").replace("key_bias", "query_bias")


def assert_near(found: dict[str, Tensor], truth: dict[str, Tensor], tolerance: float, floor: float = 0.02) -> None:
    assert found.keys() == truth.keys()
    for name, right in truth.items():
        assert found[name] is not None, name
        size = max(right.norm().item(), truth[measured_by(name)].norm().item(), floor * right.numel() ** 0.5)
        assert (found[name].double() - right).norm() <= tolerance * size, name


@pytest.mark.parametrize("index", range(len(CASES)))
def test_all_options_in_pairs(index: int) -> None:
    case, (qkv_format, _) = CASES[index], CASES[index]["layout"]
    o = options_of(case)
    layer, batch = layer_of(o, qkv_format, case["bias"]), batch_of(o, qkv_format)
    dys = [torch.randn_like(each.x) for each in batch.inputs]
    call = {"checkpoint_core_attention": case["checkpoint_core_attention"]}
    assert_near(ran(layer, batch, dys, qkv_format, **call), exact(layer, o, batch, dys), 2e-5)


IN_FP8: list[tuple[str, Options]] = [
    ("bshd", Options(channels=9, groups=2, rows="interleaved")),
    ("sbhd", Options(channels=16, rotary="halves")),
    ("bshd", Options(channels=16, groups=2, rows="interleaved", layer_type="decoder", normalization="RMSNorm")),
    ("thd", Options(channels=16, attention="padding_causal", activation="swiglu", residual="parallel")),
    ("sbhd", Options(channels=16, residual="after the norm, output norm", rows="in three", zero_centered_gamma=True)),
]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
@pytest.mark.parametrize("index", range(len(IN_FP8)))
def test_in_fp8_within_the_formats_rounding(index: int, recipe: str) -> None:
    qkv_format, o = IN_FP8[index]
    hidden, ffn = (o.heads * o.channels, 6 * o.channels)
    layer, batch = layer_of(o, qkv_format, hidden=hidden, ffn=ffn), batch_of(o, qkv_format, hidden=hidden)
    dys = [torch.randn_like(each.x) for each in batch.inputs]
    with fp8_autocast(fp8_recipe={"name": recipe, "fp8_dpa": True}):
        found = ran(layer, batch, dys, qkv_format)
    assert layer.self_attention.core_attention.record.fp8 == 1
    assert_near(found, exact(layer, o, batch, dys), 1.5 * expected_error(layer, [1], E5M2), floor=0.2)
    layer.zero_grad()
    plain = ran(layer, batch, dys, qkv_format)
    assert not torch.equal(plain["output"], found["output"])


E4M3, E5M2 = 0.0265, 0.053
"""Relative rounding errors, root mean square: steps of 1 / 8 and 1 / 4 over ``sqrt(12)``, for mantissas of 1 to 2."""


def expected_error(layer: TransformerLayer, attentions: list[int], gradients: float) -> float:
    """Of the deepest gradient, by variances that add: each product rounds two operands, forward and backward.

    Products of one after the other: QKV, projection, FC1 and FC2, cross attention's queries and projection, and two of
    each attention in FP8. Backward one operand of each is a gradient.
    """
    products = (4 if layer.layer_type == "encoder" else 6) + 2 * sum(attentions)
    return (products * (2 * E4M3**2 + E4M3**2 + gradients**2)) ** 0.5


@pytest.mark.filterwarnings("ignore:DotProductAttention runs in high precision")
@pytest.mark.parametrize("index", range(len(CASES)))
def test_all_options_in_pairs_in_fp8(index: int) -> None:
    """Every error is at most 1.5 times the expected one, and twice it of a head's few channels, whose norms scatter.

    Errors do not cancel where a gradient's terms do, so that they are measured by what the gradient has where the rows
    of the output's gradient have random signs; a bias of keys, :func:`measured_by` that of queries.
    """
    case, (qkv_format, mask) = CASES[index], CASES[index]["layout"]
    recipe = list(RECIPES)[index % len(RECIPES)]
    o = options_of(case)
    layer, batch = layer_of(o, qkv_format, case["bias"]), batch_of(o, qkv_format)
    dys = [torch.randn_like(each.x) for each in batch.inputs]
    with fp8_autocast(fp8_recipe={"name": recipe, "fp8_dpa": True}):
        found = ran(layer, batch, dys, qkv_format, checkpoint_core_attention=case["checkpoint_core_attention"])
    cores = [module for module in layer.modules() if isinstance(module, DotProductAttention)]
    attentions = [core.record.fp8 for core in cores]
    vanilla = o.softmax_type == "vanilla"
    assert attentions[0] == (vanilla and mask != "arbitrary" and o.bias_type == "no_bias")
    assert attentions[1:] == [vanilla] * (o.layer_type == "decoder")
    truth = exact(layer, o, batch, dys)
    signed = [exact(layer, o, batch, [dy * torch.randn(len(dy), 1).sign() for dy in dys]) for _ in range(4)]
    expected = expected_error(layer, attentions, E5M2 if recipe in ("delayed", "tensorwise") else E4M3)
    assert found.keys() == truth.keys()
    for name, right in truth.items():
        of = measured_by(name)
        size = max(truth[of].norm(), sum(each[of].square().sum() for each in signed).div(len(signed)).sqrt())
        assert (found[name].double() - right).norm() <= (1.5 if right.numel() >= 32 else 2) * expected * size, name
    assert (found["output"].double() - truth["output"]).norm() > 1e-3 * truth["output"].norm(), "it ran in FP8"


@pytest.mark.parametrize("rows", [0, 1, 13])
def test_rows_of_any_number(rows: int) -> None:
    layer = layer_of(Options(), "sbhd")
    x = torch.randn(rows, 2, 32, requires_grad=True)
    with fp8_autocast(fp8_recipe="rowwise"):
        y = layer(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert x.grad.shape == x.shape


def test_the_defaults_of_transformer_engine() -> None:
    layer = TransformerLayer(64, 128, 4)
    assert (layer.hidden_dropout, layer.self_attention.core_attention.attention_dropout) == (0.1, 0.1)
    assert layer.self_attention.core_attention.attn_mask_type == "causal"
    assert abs(layer.self_attention.proj.weight.std().item() - 0.023) < 0.002
    assert not any(p.any() for name, p in layer.named_parameters() if name.endswith("bias"))
    assert all((p == 1).all() for name, p in layer.named_parameters() if name.endswith("layer_norm_weight"))


def test_a_bias_of_the_scores_reaches_both_attentions() -> None:
    """As in Transformer Engine, whose layers pass it to self and cross attention alike."""
    o = Options(layer_type="decoder")
    layer, x = layer_of(o, "sbhd"), torch.randn(5, 1, 32)
    bias = torch.full((1, 1, 5, 5), -1e9)
    bias[..., 0] = 0  # all look at the first
    y = layer(x, encoder_output=x, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    moved = x.clone()
    moved[1:] += 1.0
    z = layer(x, encoder_output=moved, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(y, z)


# Dropout and stochastic depth.


def branch_of_mlp(**options: Any) -> TransformerLayer:
    """A layer of which attention adds nothing."""
    layer = TransformerLayer(32, 48, 4, attention_dropout=0.0, **options)
    with torch.no_grad():
        layer.self_attention.proj.weight.zero_()
        layer.layernorm_mlp.fc2_weight.normal_()
    return layer


def test_dropout_leaves_out_elements_and_raises_the_others() -> None:
    layer, x = branch_of_mlp(hidden_dropout=0.25), torch.randn(40, 8, 32)
    branch = layer.eval()(x) - x
    torch.manual_seed(3)
    kept = (layer.train()(x) - x) / branch
    torch.manual_seed(3)
    assert torch.equal(((layer(x) - x) / branch), kept)
    is_kept = (kept - 4 / 3).abs() < 1e-2
    assert (is_kept | (kept.abs() < 1e-2)).float().mean() > 0.999  # but where the branch is about 0
    assert abs(is_kept.float().mean().item() - 0.75) < 0.02


@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd", "thd"])
def test_drop_path_leaves_out_whole_sequences(qkv_format: str) -> None:
    options = {"hidden_dropout": 0.0, "drop_path_rate": 0.5, "attn_input_format": qkv_format}
    layer = branch_of_mlp(**options, self_attn_mask_type="padding" if qkv_format == "thd" else "causal")
    sequences = [torch.randn(6, 32) for _ in range(64)]
    if qkv_format == "thd":
        x, call = torch.cat(sequences), {"cu_seqlens_q": torch.arange(65, dtype=torch.int32) * 6}
    else:
        x, call = torch.stack(sequences, 1 if qkv_format == "sbhd" else 0), {}
    branch = layer.eval()(x, **call) - x
    added = layer.train()(x, **call) - x
    if qkv_format == "thd":
        branch, added = branch.unflatten(0, (64, 6)), added.unflatten(0, (64, 6))
    elif qkv_format == "sbhd":
        branch, added = branch.transpose(0, 1), added.transpose(0, 1)
    kept = added.flatten(1).norm(dim=1) > 0
    assert 15 < kept.sum() < 49
    torch.testing.assert_close(added[kept], 2 * branch[kept], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["hidden_dropout", "drop_path_rate"])
def test_a_probability_of_1_leaves_the_residual(name: str) -> None:
    layer, x = branch_of_mlp(**{"hidden_dropout": 0.0, name: 1.0}), torch.randn(5, 2, 32)
    assert torch.equal(layer(x), x)
