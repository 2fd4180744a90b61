"""Layers, and batches of sequences for them in every format, with what the reference takes of the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fp8 import TransformerLayer
from tests.transformer import layer_reference
from tests.transformer.covering import covering
from tests.transformer.layer_reference import Inputs, Options

HIDDEN, FFN = 32, 48
POSITIONS = 16
EVEN, RAGGED = ((6, 5), (6, 5)), ((7, 5), (3, 8))
"""Rows of each sequence, and of its encoder."""

LAYOUTS = (
    ("sbhd", "causal"),
    ("bshd", "no_mask"),
    ("bshd", "causal_bottom_right"),
    ("sbhd", "arbitrary"),
    ("bshd", "padding"),
    ("sbhd", "padding_causal"),
    ("thd", "padding_causal"),
    ("thd", "padding"),
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "layout": LAYOUTS,
    "residual": ("before the norm", "after the norm", "output norm", "after the norm, output norm", "parallel"),
    "rows": ("split", "interleaved", "in three"),
    "groups": (4, 2, 1),
    "layer_type": ("encoder", "decoder"),
    "norm": (("LayerNorm", False), ("LayerNorm", True), ("RMSNorm", False), ("RMSNorm", True)),
    "activation": ("gelu", "swiglu", "geglu", "srelu"),
    "rotary": ("none", "halves", "neighbours"),
    "qk_norm": ("none", "L2Normalization", "RMSNorm,before", "LayerNorm"),
    "bias_type": ("no_bias", "post_scale_bias", "pre_scale_bias", "alibi"),
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "bias": (True, False),
    "channels": (8, 12),
    "window": (None, 3),
    "checkpoint_core_attention": (False, True),
}


def _allowed(case: Mapping[str, Any]) -> bool:
    layout = case.get("layout", ("", ""))
    no_decoder = case.get("residual") == "parallel" or case.get("bias_type", "no_bias") != "no_bias"
    if no_decoder and case.get("layer_type") == "decoder":
        return False  # the bias of Transformer Engine goes to cross attention, too: a test of its own
    if case.get("bias_type", "no_bias").endswith("scale_bias") and layout[0] == "thd":
        return False
    return case.get("window") is None or "causal" in layout[1] or not layout[1]


CASES = covering(CHOICES, _allowed)
"""Each value of one choice meets each of every other."""


class Batch(NamedTuple):
    """The arguments of a forward, and of the reference for each sequence."""

    x: Tensor
    call: dict[str, Any]
    inputs: list[Inputs]


def options_of(case: Mapping[str, Any]) -> Options:
    _, mask = case["layout"]
    return Options(
        groups=case["groups"],
        channels=case["channels"],
        layer_type=case["layer_type"],
        rows=case["rows"],
        residual=case["residual"],
        normalization=case["norm"][0],
        zero_centered_gamma=case["norm"][1],
        activation=case["activation"],
        attention=mask,
        window=case["window"],
        rotary=case["rotary"],
        qk_norm=case["qk_norm"],
        bias_type=case["bias_type"],
        softmax_type=case["softmax_type"],
    )


def layer_of(o: Options, qkv_format: str, bias: bool = True, hidden: int = HIDDEN, ffn: int = FFN) -> TransformerLayer:
    """A layer whose every parameter has been drawn, norms and biases too."""
    ragged = qkv_format == "thd" or "padding" in o.attention
    layer = TransformerLayer(
        hidden,
        ffn,
        o.heads,
        o.groups,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        kv_channels=o.channels,
        self_attn_mask_type=o.attention,
        window_size=None if o.window is None else (o.window, 0),
        enc_dec_attn_mask_type="padding" if ragged else "no_mask",
        apply_residual_connection_post_layernorm=o.residual.startswith("after the norm"),
        output_layernorm=o.residual.endswith("output norm"),
        parallel_attention_mlp=o.residual == "parallel",
        layer_type=o.layer_type,
        fuse_qkv_params=o.rows != "split",
        qkv_weight_interleaved=o.rows != "in three",
        rotary_pos_interleaved=o.rotary == "neighbours",
        normalization=o.normalization,
        zero_centered_gamma=o.zero_centered_gamma,
        activation=o.activation,
        bias=bias,
        attn_input_format=qkv_format,
        qk_norm_type=None if o.qk_norm == "none" else o.qk_norm.partition(",")[0],
        qk_norm_before_rope=o.qk_norm.endswith("before"),
        softmax_type=o.softmax_type,
    )
    draw(layer)
    return layer


def draw(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            spread = 0.3 if parameter.dim() < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape) * spread + (parameter.dim() < 2) * 0.5)


def batch_of(o: Options, qkv_format: str, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32) -> Batch:
    ragged = qkv_format == "thd" or "padding" in o.attention
    lengths = RAGGED if ragged else EVEN
    turning = o.channels // 2 - 2  # pairs; the other channels stay
    angles = torch.rand(POSITIONS, turning, dtype=torch.float64) * 6
    sees = torch.rand(6, 6) < 0.6
    sees[:, 0] = True
    bias = torch.randn(o.heads, lengths[0][0], lengths[0][0], dtype=torch.float64) if "scale" in o.bias_type else None
    inputs = []
    for rows, encoder_rows in lengths:
        encoder = torch.randn(encoder_rows, hidden).to(dtype).double() if o.layer_type == "decoder" else None
        own = None if bias is None else bias[:, :rows, :rows]
        inputs.append(Inputs(torch.randn(rows, hidden).to(dtype).double(), encoder, angles, sees, own))
    call: dict[str, Any] = {"core_attention_bias_type": o.bias_type}
    if bias is not None:
        call["core_attention_bias"] = bias[None].float()
    if o.rotary != "none":
        both = angles.repeat_interleave(2, 1) if o.rotary == "neighbours" else torch.cat([angles, angles], 1)
        call["rotary_pos_emb"] = both[:, None, None]
    if o.attention == "arbitrary":
        call["attention_mask"] = ~sees[None, None]
    of_x, of_encoder = zip(*lengths)
    if qkv_format == "thd":
        call |= {"cu_seqlens_q": _added_up(of_x), "cu_seqlens_kv": _added_up(of_encoder)}
    elif ragged:
        call["attention_mask"] = _padding(of_x)
        call["enc_dec_attn_mask"] = (_padding(of_x), _padding(of_encoder)) if o.layer_type == "decoder" else None
    if o.layer_type == "decoder":
        call["encoder_output"] = laid_out([each.encoder for each in inputs], qkv_format).to(dtype)
    return Batch(laid_out([each.x for each in inputs], qkv_format).to(dtype), call, inputs)


def laid_out(sequences: list[Any], qkv_format: str) -> Tensor:
    if qkv_format == "thd":
        return torch.cat(sequences)
    return nn.utils.rnn.pad_sequence(sequences, batch_first=qkv_format == "bshd")


def taken_apart(x: Tensor, lengths: list[int], qkv_format: str) -> list[Tensor]:
    if qkv_format == "thd":
        return list(x.split(lengths))
    return [row[:length] for row, length in zip(x.transpose(0, 1) if qkv_format == "sbhd" else x, lengths)]


def exact(layer: nn.Module, o: Options, batch: Batch, dys: list[Tensor]) -> dict[str, Tensor]:
    """Outputs, gradients of inputs and gradients of parameters by name, of the definition in float64."""
    p = {name: each.detach().double().requires_grad_() for name, each in layer.named_parameters()}
    inputs = [
        each._replace(
            x=each.x.clone().requires_grad_(),
            encoder=None if each.encoder is None else each.encoder.clone().requires_grad_(),
        )
        for each in batch.inputs
    ]
    outputs = [layer_reference.layer(p, o, each) for each in inputs]
    torch.autograd.backward(outputs, dys)
    found = {"output": torch.cat(outputs), "dx": torch.cat([each.x.grad for each in inputs])}
    if o.layer_type == "decoder":
        found["dencoder"] = torch.cat([each.encoder.grad for each in inputs])
    return found | {name: each.grad for name, each in p.items()}


def ran(layer: nn.Module, batch: Batch, dys: list[Tensor], qkv_format: str, **call: Any) -> dict[str, Tensor]:
    """The same, of the layer itself."""
    x = batch.x.clone().requires_grad_()
    given = batch.call | call
    if "encoder_output" in given:
        given["encoder_output"] = given["encoder_output"].clone().requires_grad_()
    output = layer(x, **given)
    lengths = [len(each.x) for each in batch.inputs]
    output.backward(laid_out(dys, qkv_format).to(output.dtype))
    found = {
        "output": torch.cat(taken_apart(output, lengths, qkv_format)),
        "dx": torch.cat(taken_apart(x.grad, lengths, qkv_format)),
    }
    if "encoder_output" in given:
        of_encoder = [len(each.encoder) for each in batch.inputs]
        found["dencoder"] = torch.cat(taken_apart(given["encoder_output"].grad, of_encoder, qkv_format))
    return found | {name: each.grad for name, each in layer.named_parameters()}


def _added_up(lengths: Any) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def _padding(lengths: Any) -> Tensor:
    return (torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None])[:, None, None]
