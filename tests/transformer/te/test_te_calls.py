"""Calls that Transformer Engine's users write, and what comes of them: against torch, and against the plain call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_fp8
from lightning_fp8 import LayerNorm, LayerNormLinear, LayerNormMLP, Linear, RMSNorm, TransformerLayer, fp8_autocast


def made(kind: Any, *sizes: int, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(*sizes, **options)


# --- One rank ---------------------------------------------------------------------------------------------------------

OF_ONE_RANK: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Linear": ((32, 32), {"parallel_mode": "row", "sequence_parallel": True, "tp_size": 1}),
    "LayerNormLinear": ((32, 32), {"parallel_mode": "column", "sequence_parallel": True, "tp_size": 1}),
    "LayerNormMLP": ((32, 32), {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": 1}),
    "MultiheadAttention": ((32, 4), {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": 1}),
    "TransformerLayer": ((32, 32, 4), {"set_parallel_mode": True, "sequence_parallel": True, "tp_size": 1}),
}


@pytest.mark.parametrize("name", OF_ONE_RANK)
def test_arguments_of_parallelism_have_no_effect_on_one_rank(name: str) -> None:
    sizes, options = OF_ONE_RANK[name]
    kind = getattr(lightning_fp8, name)
    x = torch.randn(6, 2, 32)
    assert torch.equal(made(kind, *sizes, **options).eval()(x), made(kind, *sizes).eval()(x))


# --- torch.autocast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_round_once_to_autocasts_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(4, 32, requires_grad=True)
    exact = {
        LayerNorm: F.layer_norm(x.double(), (32,), eps=1e-5),
        RMSNorm: F.rms_norm(x.double(), (32,), eps=1e-5),
    }
    for kind, expected in exact.items():
        with torch.autocast("cpu", dtype):
            y = kind(32)(x)
            of_float64 = kind(32)(x.double())
        assert (y.dtype, of_float64.dtype) == (dtype, torch.float64)
        torch.testing.assert_close(y.double(), expected, rtol=1.02 * torch.finfo(dtype).eps / 2, atol=1e-6)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert gradient.dtype == torch.float32


@pytest.mark.parametrize("recipe", ["tensorwise", None])
@pytest.mark.parametrize(
    "options", [{}, {"output_layernorm": True}, {"apply_residual_connection_post_layernorm": True}]
)
def test_a_transformer_layer_casts_its_input_to_autocasts_dtype(recipe: str | None, options: dict[str, Any]) -> None:
    layer = made(TransformerLayer, 32, 32, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)
    x = torch.randn(6, 2, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y, of_cast = layer(x), layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, of_cast)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


@pytest.mark.parametrize("recipe", ["tensorwise", None])
@pytest.mark.parametrize("kind", [LayerNormLinear, LayerNormMLP])
def test_the_norm_beside_y_has_its_dtype(kind: Any, recipe: str | None) -> None:
    layer = made(kind, 32, 32, return_layernorm_output=True)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", torch.bfloat16), fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        y, normalized = layer(x)
    assert (y.dtype, normalized.dtype) == (torch.bfloat16, torch.bfloat16)
    expected = F.layer_norm(x.double(), (32,), eps=1e-5)
    torch.testing.assert_close(normalized.double(), expected, rtol=2**-8, atol=1e-6)


# --- Lengths that a format does not use -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [{"name": "tensorwise", "fp8_dpa": True}, None])
@pytest.mark.parametrize("qkv_format", ["sbhd", "bshd"])
def test_padded_lengths_are_of_thd_alone(qkv_format: str, recipe: Any) -> None:
    rows = (7, 2) if qkv_format == "sbhd" else (2, 7)
    core = lightning_fp8.DotProductAttention(4, 8, qkv_format=qkv_format, attn_mask_type="padding_causal")
    layer = made(TransformerLayer, 32, 32, 4, attn_input_format=qkv_format, self_attn_mask_type="padding_causal").eval()
    q, k, v = (torch.randn(*rows, 4, 8) for _ in range(3))
    lengths: dict[str, Tensor] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), torch.tensor([0, 5, 12]))
    padded = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), torch.tensor([0, 7, 14]))
    angles = lightning_fp8.RotaryPositionEmbedding(8)(7)
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        assert torch.equal(core(q, k, v, **lengths, **padded), core(q, k, v, **lengths))
        x = torch.randn(*rows, 32)
        with_padded = layer(x, rotary_pos_emb=angles, **lengths, **padded)
        assert torch.equal(with_padded, layer(x, rotary_pos_emb=angles, **lengths))


# --- Names ------------------------------------------------------------------------------------------------------------


def test_names() -> None:
    x = torch.randn(4, 32)
    for norm in (LayerNorm(32), RMSNorm(32)):
        assert torch.equal(norm(input=x), norm(x))
    attention = lightning_fp8.MultiheadAttention(32, 4, qk_norm_type="L2Normalization")
    assert attention.q_norm is attention.k_norm
    attention = lightning_fp8.MultiheadAttention(32, 4, qk_norm_type="RMSNorm")
    assert attention.q_norm is not attention.k_norm


def test_save_original_input_has_no_effect() -> None:
    x = torch.randn(4, 32, requires_grad=True)
    results = []
    for saves in (True, False):
        layer = made(Linear, 32, 32, save_original_input=saves)
        with fp8_autocast(fp8_recipe="tensorwise"):
            y = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, layer.weight])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "mxfp8"])
@pytest.mark.parametrize("kind", [Linear, LayerNormLinear, LayerNormMLP])
def test_fp8_weights_in_inference_mode(kind: Any, recipe: str) -> None:
    with torch.no_grad(), lightning_fp8.fp8_model_init(recipe=recipe):
        layer = made(kind, 32, 32)
    x = torch.randn(4, 32)
    with fp8_autocast(fp8_recipe=recipe):
        with torch.inference_mode():
            found = layer(x)
        assert torch.equal(found, layer(x))


@pytest.mark.parametrize("dim", [-3, -2])
@pytest.mark.parametrize("recipe", [{"name": "tensorwise", "fp8_dpa": True}, None])
def test_packed_queries_keys_and_values(dim: int, recipe: Any) -> None:
    core = lightning_fp8.DotProductAttention(4, 8)
    packed = torch.randn(7, 2, *((3, 4) if dim == -3 else (4, 3)), 8, requires_grad=True)
    q, k, v = (each.detach().clone().requires_grad_() for each in packed.unbind(dim))
    with fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe):
        expected = core(q, k, v)
        of_qkv = core(qkv_layer=packed, qkv_interleave_dim=dim)
        of_kv = core(q, kv_layer=torch.stack([k, v], dim), qkv_interleave_dim=dim)
    assert torch.equal(of_qkv, expected)
    assert torch.equal(of_kv, expected)
    of_qkv.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(packed.grad, torch.stack([q.grad, k.grad, v.grad], dim))  # type: ignore[list-item]
    for call in ({"qkv_layer": packed, "key_layer": k}, {"kv_layer": packed}, {"query_layer": q}):
        with pytest.raises(TypeError):
            core(**call)


@pytest.mark.filterwarnings("ignore:attn_mask_type='arbitrary' without attention_mask")
def test_arbitrary_without_a_mask_is_attention_to_all_keys() -> None:
    x, encoder_output = torch.randn(5, 2, 32), torch.randn(9, 2, 32)
    attention = made(lightning_fp8.MultiheadAttention, 32, 4).eval()
    torch.testing.assert_close(attention(x, attn_mask_type="arbitrary"), attention(x, attn_mask_type="no_mask"))
    layer = made(lightning_fp8.TransformerLayer, 32, 48, 4, layer_type="decoder").eval()
    outputs = [
        layer(x, self_attn_mask_type=kind, enc_dec_attn_mask_type=kind, encoder_output=encoder_output)
        for kind in ("arbitrary", "no_mask")
    ]
    torch.testing.assert_close(*outputs)
