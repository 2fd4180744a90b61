"""Experts of several families, tokens with their experts, and two computations by hand that they are compared with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fp8 import Linear, convert_module, fp8_autocast, ops
from lightning_fp8.numerics.recipes import Recipe
from lightning_fp8.numerics.scaled import Role, ScaledTensor

EXPERTS, HIDDEN, INTERMEDIATE = 6, 136, 68
"""Sizes that are no multiples of 16, and blocks of 128 with a remainder."""

SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", "MixtralExperts", {"num_local_experts": EXPERTS}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeExperts", {"num_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE}),
    "deepseek_v3": (
        "DeepseekV3Config", "DeepseekV3Experts", {"n_routed_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE},
    ),
    "gpt_oss": ("GptOssConfig", "GptOssExperts", {"num_local_experts": EXPERTS}),
    "nemotron_h": (
        "NemotronHConfig", "NemotronHExperts", {"n_routed_experts": EXPERTS, "moe_intermediate_size": INTERMEDIATE},
    ),
    "muse_spark": ("", "MuseSparkExperts", {}),
}  # fmt: skip
"""Gated ones three times; transposed with biases and an interleaved gate; without a gate; with a norm behind."""


def experts(kind: str, dtype: torch.dtype = torch.float32, converted: bool = True, count: int = EXPERTS) -> Any:
    """The experts of one layer."""
    pytest.importorskip("transformers", "5.0")
    config_name, class_name, options = KINDS[kind]
    try:
        modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    except ImportError:
        pytest.skip(f"transformers has no {kind}")
    if config_name:
        counts = {name: count for name in options if "experts" in name}
        config = getattr(importlib.import_module("transformers"), config_name)(**{**SIZES, **options, **counts})
    else:  # of a model for images and text
        options = {"moe_hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "hidden_act": "silu"}
        config = type("Config", (), {**options, "num_local_experts": count, "post_norm_eps": 1e-6})()
    config._experts_implementation = "eager"  # grouped_mm takes no rows of odd sizes in BF16
    torch.manual_seed(0)
    module = getattr(modeling, class_name)(config)
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.05)
    module = module.to(dtype).train()
    if converted:
        convert_module(nn.ModuleList([module]), first_last_layers_bf16=False)
    return module


def _some(tokens: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, (tokens, 2), generator=torch.Generator().manual_seed(seed))


ROUTINGS: dict[str, Callable[[], Tensor]] = {
    "ragged": lambda: _some(150, EXPERTS),
    "one expert": lambda: torch.full((70, 2), 3),
    "one row": lambda: torch.tensor([[4, 1]]),
    "skewed": lambda: _some(90, 3) ** 2,
    "no token": lambda: _some(0, EXPERTS),
    "other ranks": lambda: _some(80, EXPERTS + 4).clamp(max=EXPERTS),
    "NaN": lambda: _some(40, EXPERTS),
}
"""The two experts of each token."""


def given(routing: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, the experts of tokens, their weights, and the gradient of the result."""
    index = ROUTINGS[routing]()
    generator = torch.Generator().manual_seed(1)
    h = torch.randn(len(index), HIDDEN, generator=generator) * torch.logspace(-1, 1, len(index))[:, None]
    w = torch.rand(index.shape, generator=generator)
    dy = torch.randn(h.shape, generator=generator) * torch.logspace(1, -2, HIDDEN)
    if routing == "NaN":
        h[5, 7] = torch.nan
    if routing == "other ranks":  # tokens of others alone: neither they nor their gradients are looked at
        alone = (index == EXPERTS).all(1)
        assert alone.any()
        h[alone], w[alone], dy[alone] = torch.nan, torch.nan, torch.nan
    return h.to(dtype), index, w.to(dtype), dy.to(dtype)


Multiply = Callable[[int, Tensor, Tensor, list[slice]], Tensor]
"""Of one of the two GEMMs, rows that are sorted by expert, the weight ``[E, N, K]`` and the rows of each expert."""


def by_hand(module: Any, h: Tensor, index: Tensor, w: Tensor, dy: Tensor, multiply: Multiply) -> dict[str, Tensor]:
    """Experts as their definition says, one after another: the result and all gradients."""
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    names = ("gate_up_proj" if module.has_gate else "up_proj"), "down_proj"
    own = {
        name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters(recurse=False)
    }
    of_experts = [(index == expert).nonzero() for expert in range(len(own[names[0]]))]
    place = torch.cat(of_experts)
    ends = torch.tensor([len(each) for each in of_experts]).cumsum(0).tolist()
    groups = [slice(start, end) for start, end in zip([0, *ends], ends)]

    def layer(gemm: int, rows: Tensor) -> Tensor:
        weight = own[names[gemm]].mT if module.is_transposed else own[names[gemm]]
        y = multiply(gemm, rows, weight, groups)
        if not module.has_bias:
            return y
        bias = own[f"{names[gemm]}_bias"]
        return y + torch.cat([bias[e].expand(rows.stop - rows.start, -1) for e, rows in enumerate(groups)])

    hidden = layer(0, h[place[:, 0]])
    y = layer(1, module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden))
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * w[place[:, 0], place[:, 1]][:, None]
    both = [torch.zeros_like(h).index_put((place[part, 0],), y[part]) for part in (place[:, 1] == 0, place[:, 1] == 1)]
    result = both[0] + both[1]
    result.backward(dy)
    none = torch.zeros(())
    gradients = {name: none if each.grad is None else each.grad for name, each in own.items()}
    return {"y": result.detach(), "dx": h.grad, "d routing": w.grad, **gradients}  # type: ignore[dict-item]


def run(module: Any, h: Tensor, index: Tensor, w: Tensor, dy: Tensor, recipe: Any, **region: Any) -> dict[str, Tensor]:
    """The same by the module."""
    h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
    module.zero_grad()
    with fp8_autocast(fp8_recipe=recipe, **region):
        y = module(h, index, w)
    y.backward(dy)
    gradients = {name: each.grad.clone() for name, each in module.named_parameters(recurse=False) if each.requires_grad}
    return {"y": y.detach(), "dx": h.grad, "d routing": w.grad, **gradients}  # type: ignore[dict-item]


def loop_of_linears(recipe: str) -> Multiply:
    """A :class:`lightning_fp8.Linear` for each expert."""

    def multiply(gemm: int, rows: Tensor, weight: Tensor, groups: list[slice]) -> Tensor:
        parts = []
        for each, group in zip(weight, groups):
            linear = Linear(each.shape[1], each.shape[0], bias=False, dtype=each.dtype)
            del linear.weight
            linear.weight = each if each.is_contiguous() else each.contiguous()
            linear._parameters["weight"] = linear.__dict__.pop("weight")
            with fp8_autocast(fp8_recipe=recipe):
                parts.append(linear(rows[group]))
        return torch.cat(parts)

    return multiply


class WholeTensorCasts:
    """Casts of all rows and of all experts with one scale, by hand, and GEMMs of each expert, in float64 or FP8.

    Attributes:
        scales: the scale for each cast, or 0, of :attr:`amaxes`' keys.
        amaxes: what the casts have to observe, by GEMM and role.
    """

    def __init__(self, recipe: Recipe, exact: bool, scales: dict[tuple[int, Role], Tensor] | None = None) -> None:
        self.recipe, self.exact, self.scales = recipe, exact, scales or {}
        self.amaxes: dict[tuple[int, Role], float] = {}

    def __call__(self, gemm: int, rows: Tensor, weight: Tensor, groups: list[slice]) -> Tensor:
        return _WholeTensorFunction.apply(rows, weight, groups, self, gemm)  # type: ignore[no-any-return]

    def cast(self, x: Tensor, gemm: int, role: Role) -> ScaledTensor:
        x = x.detach().flatten(0, -2).contiguous()
        self.amaxes[gemm, role] = float(x.double().abs().max()) if x.numel() else 0.0
        made = ops.quantize(x, self.recipe.cast(role), scale=self.scales.get((gemm, role))).rowwise
        assert made is not None
        return made

    def multiply(self, a: ScaledTensor, b: ScaledTensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
        if self.exact:
            return (a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()).to(dtype)
        return ops.scaled_mm(a, b, out_dtype=dtype, fast_accum=fast)


class _WholeTensorFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, groups: list[slice], hand: WholeTensorCasts, gemm: int) -> Any:
        x8, w8 = hand.cast(rows, gemm, Role.INPUT), hand.cast(weight, gemm, Role.WEIGHT)
        ctx.kept = x8, w8, weight, groups, hand, gemm
        codes = w8.data.view(weight.shape)
        return torch.cat(
            [
                hand.multiply(_of(x8, x8.data[each]), _of(w8, codes[e]), rows.dtype, True)
                for e, each in enumerate(groups)
            ]
        )

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        x8, w8, weight, groups, hand, gemm = ctx.kept
        dy8, codes = hand.cast(dy, gemm, Role.GRAD_OUTPUT), w8.data.view(weight.shape)
        dx, dw = [], []
        for e, each in enumerate(groups):
            of_dy, of_x = _of(dy8, dy8.data[each]), _of(x8, x8.data[each])
            dx.append(hand.multiply(of_dy, _of(w8, codes[e].t().contiguous()), dy.dtype))
            empty = each.start == each.stop
            dw.append(torch.zeros_like(weight[e]) if empty else hand.multiply(_t(of_dy), _t(of_x), weight.dtype))
        return torch.cat(dx), torch.stack(dw), None, None, None


def _of(operand: ScaledTensor, data: Tensor) -> ScaledTensor:
    return ScaledTensor(data, operand.scale_inv, operand.layout)


def _t(operand: ScaledTensor) -> ScaledTensor:
    return _of(operand, operand.data.t().contiguous())
