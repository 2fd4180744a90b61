"""A TransformerLayer from its definition, in float64, sequence by sequence, with plain tensor operations."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-5


class Options(NamedTuple):
    """Of a layer and its call, as the tests vary them; Transformer Engine's names."""

    heads: int = 4
    groups: int = 4
    channels: int = 8
    layer_type: str = "encoder"
    rows: str = "split"
    residual: str = "before the norm"
    normalization: str = "LayerNorm"
    zero_centered_gamma: bool = False
    activation: str = "gelu"
    attention: str = "causal"
    cross_attention: str = "no_mask"
    window: int | None = None
    rotary: str = "none"
    qk_norm: str = "none"
    bias_type: str = "no_bias"
    softmax_type: str = "vanilla"


class Inputs(NamedTuple):
    """Of one sequence: rows of the layer, of its encoder, angles of positions, a mask (True sees) and a bias."""

    x: Tensor
    encoder: Tensor | None
    angles: Tensor
    sees: Tensor | None
    bias: Tensor | None


def layer(p: dict[str, Tensor], o: Options, inputs: Inputs) -> Tensor:
    """``[s, hidden]`` of a layer whose parameters are ``p``."""
    x = inputs.x
    if o.residual == "parallel":
        attended, _ = attention(p, "self_attention", o, x, None, inputs)
        return x + attended + mlp(p, o, x)[0]
    post = o.residual in ("after the norm", "after the norm, output norm")
    attended, normalized = attention(p, "self_attention", o, x, None, inputs)
    x = (normalized if post else x) + attended
    if inputs.encoder is not None:
        attended, normalized = attention(p, "inter_attention", o, x, inputs.encoder, inputs)
        x = (normalized if post else x) + attended
    y, normalized = mlp(p, o, x)
    y = (normalized if post else x) + y
    return norm(y, p["layernorm.weight"], p.get("layernorm.bias"), o) if "layernorm.weight" in p else y


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, o: Options) -> Tensor:
    gamma = 1 + weight if o.zero_centered_gamma else weight
    if o.normalization == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * gamma
    return y if bias is None else y + bias


def mlp(p: dict[str, Tensor], o: Options, x: Tensor) -> tuple[Tensor, Tensor]:
    name = "layernorm_mlp."
    normalized = norm(x, p[f"{name}layer_norm_weight"], p.get(f"{name}layer_norm_bias"), o)
    hidden = F.linear(normalized, p[f"{name}fc1_weight"], p.get(f"{name}fc1_bias"))
    first, second = hidden.chunk(2, -1) if o.activation.endswith("glu") else (hidden, 1.0)
    curve = {
        "gelu": lambda z: z * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
        "relu": lambda z: z.clamp(min=0),
        "srelu": lambda z: z.clamp(min=0) ** 2,
        "silu": lambda z: z / (1 + (-z).exp()),
    }[{"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}.get(o.activation, o.activation)]
    return F.linear(curve(first) * second, p[f"{name}fc2_weight"], p.get(f"{name}fc2_bias")), normalized


def rows_of(o: Options, parts: str) -> dict[str, list[int]]:
    """The rows of a fused weight that make queries, keys and values (``"qkv"`` or ``"kv"``), head by head."""
    share = o.heads // o.groups
    of_head = {"q": o.heads, "k": o.groups, "v": o.groups}
    found: dict[str, list[int]] = {part: [] for part in parts}
    if o.rows == "interleaved":
        place = 0
        for _ in range(o.groups):
            for part in parts:
                count = (share if part == "q" else 1) * o.channels
                found[part] += range(place, place + count)
                place += count
    else:
        place = 0
        for part in parts:
            found[part] += range(place, place + of_head[part] * o.channels)
            place += of_head[part] * o.channels
    return found


def projected(p: dict[str, Tensor], name: str, o: Options, x: Tensor, parts: str) -> list[Tensor]:
    """Heads ``[h, s, channels]`` of each of ``parts``."""
    words = {"q": "query", "k": "key", "v": "value"}
    weights, biases = [], []
    for part in parts:
        if f"{name}.weight" in p:
            rows = rows_of(o, parts)[part]
            weights.append(p[f"{name}.weight"][rows])
            biases.append(p[f"{name}.bias"][rows] if f"{name}.bias" in p else None)
        else:
            weights.append(p[f"{name}.{words[part]}_weight"])
            biases.append(p.get(f"{name}.{words[part]}_bias"))
    return [F.linear(x, w, b).unflatten(-1, (-1, o.channels)).transpose(0, 1) for w, b in zip(weights, biases)]


def attention(
    p: dict[str, Tensor], name: str, o: Options, x: Tensor, encoder: Tensor | None, inputs: Inputs
) -> tuple[Tensor, Tensor]:
    source = "layernorm_qkv" if encoder is None else "layernorm_query"
    normalized = x
    if f"{name}.{source}.layer_norm_weight" in p:
        gamma, beta = p[f"{name}.{source}.layer_norm_weight"], p.get(f"{name}.{source}.layer_norm_bias")
        normalized = norm(x, gamma, beta, o)
    else:
        source = "qkv"
    if encoder is None:
        q, k, v = projected(p, f"{name}.{source}", o, normalized, "qkv")
    else:
        (q,) = projected(p, f"{name}.{source}", o, normalized, "q")
        k, v = projected(p, f"{name}.key_value", o, encoder, "kv")
    if o.qk_norm.endswith("before"):
        q, k = head_norm(p, name, o, q, "q"), head_norm(p, name, o, k, "k")
    q, k = turned(q, inputs.angles, o), turned(k, inputs.angles, o)
    if not o.qk_norm.endswith("before"):
        q, k = head_norm(p, name, o, q, "q"), head_norm(p, name, o, k, "k")
    k, v = (each.repeat_interleave(o.heads // o.groups, 0) for each in (k, v))
    scores = q @ k.transpose(1, 2) / math.sqrt(o.channels)
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    if inputs.bias is not None:
        scores = scores + (inputs.bias / math.sqrt(o.channels) if o.bias_type == "pre_scale_bias" else inputs.bias)
    if o.bias_type == "alibi":
        slopes = torch.tensor([2.0 ** (-8 * (h + 1) / o.heads) for h in range(o.heads)], dtype=torch.float64)
        scores = scores - slopes[:, None, None] * (i - j).abs()
    kind = o.attention if encoder is None else o.cross_attention
    sees = torch.ones_like(scores[0], dtype=torch.bool)
    if "causal" in kind:
        sees = sees & (j <= i)
    if encoder is None and o.window is not None:
        sees = sees & (j >= i - o.window)
    if kind == "arbitrary":
        sees = sees & inputs.sees
    scores = scores.masked_fill(~sees, -math.inf)
    if o.softmax_type == "vanilla":
        weights = scores.softmax(-1)
    else:
        sink = p.get(f"{name}.core_attention.softmax_offset", torch.zeros(o.heads, dtype=torch.float64))
        sink = sink[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    attended = (weights @ v).transpose(0, 1).flatten(1)
    return F.linear(attended, p[f"{name}.proj.weight"], p.get(f"{name}.proj.bias")), normalized


def head_norm(p: dict[str, Tensor], name: str, o: Options, x: Tensor, of: str) -> Tensor:
    kind = o.qk_norm.partition(",")[0]
    if kind == "none":
        return x
    if kind == "L2Normalization":
        return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    weight, bias = p[f"{name}.{of}_norm.weight"], p.get(f"{name}.{of}_norm.bias")
    if kind == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, angles: Tensor, o: Options) -> Tensor:
    """Pairs of channels as complex numbers, times ``exp(i angle)``; ``angles [positions, pairs]``."""
    if o.rotary == "none":
        return x
    pairs = angles.shape[1]
    turning, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if o.rotary == "neighbours":
        z = torch.view_as_complex(turning.unflatten(-1, (pairs, 2)).contiguous())
    else:
        z = torch.complex(turning[..., :pairs], turning[..., pairs:])
    z = z * torch.polar(torch.ones_like(angles), angles)[: x.shape[1]]
    both = [z.real, z.imag]
    y = torch.stack(both, -1).flatten(-2) if o.rotary == "neighbours" else torch.cat(both, -1)
    return torch.cat([y, rest], -1)
