"""What the fused modules compute, in float64 with casts from the formats' definitions, and tables of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import LayerNormLinear, LayerNormMLP, fp8_autocast
from tests.float8_reference import MAX, cast, value_of_code

Fused = LayerNormLinear | LayerNormMLP
Rounding = Callable[[Tensor, str], Tensor]
"""An operand ``[R, K]`` that is contracted along K, as the cast of its role leaves it; roles are "x", "w" and "dy"."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
    "glu": torch.sigmoid,
}
PLAIN_OF_GATED = {
    **{"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "squared_relu", "swiglu": "silu", "glu": "glu"}
}

_DECODED = {name: torch.tensor([value_of_code(name, code) for code in range(256)], dtype=torch.float64) for name in MAX}
_BLOCKS = {"delayed": None, "tensorwise": None, "rowwise": (1, 1 << 20), "blockwise": (1, 128), "mxfp8": (1, 32)}


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases such that every two values of two factors are together in one; greedy, always the same."""
    names = list(factors)
    missing = {
        (a, i, b, j)
        for a, b in combinations(names, 2)
        for i, j in product(range(len(factors[a])), range(len(factors[b])))
    }
    cases = []
    while missing:
        a, i, b, j = min(missing)
        chosen = {a: i, b: j}
        for name in names:
            if name not in chosen:
                chosen[name] = max(range(len(factors[name])), key=lambda at: _new(missing, names, {**chosen, name: at}))
        missing -= {(a, chosen[a], b, chosen[b]) for a, b in combinations(names, 2)}
        cases.append({name: factors[name][index] for name, index in chosen.items()})
    return cases


def _new(missing: set[Any], names: list[str], chosen: Mapping[str, int]) -> int:
    return sum((a, chosen[a], b, chosen[b]) in missing for a, b in combinations([n for n in names if n in chosen], 2))


def unrounded(x: Tensor, role: str) -> Tensor:
    return x


def rounding_of(recipe: str) -> Rounding:
    """The casts of a recipe, each from the operand's own amax, as delayed scaling's are before its first update."""

    def rounded(x: Tensor, role: str) -> Tensor:
        name = "E5M2" if role == "dy" and recipe in ("delayed", "tensorwise") else "E4M3"
        block = (128, 128) if (recipe, role) == ("blockwise", "w") else _BLOCKS[recipe] or tuple(x.shape)
        scale = np.ones(x.shape)
        for top, left in product(range(0, x.shape[0], block[0]), range(0, x.shape[1], block[1])):
            at = slice(top, top + block[0]), slice(left, left + block[1])
            amax = float(x[at].abs().max())
            scale[at] = 1.0 if amax == 0 else MAX[name] / amax
        if recipe == "mxfp8":
            scale = 2.0 ** -np.ceil(-np.log2(scale.astype(np.float32)))
        elif _BLOCKS[recipe]:
            scale = 2.0 ** np.floor(np.log2(scale.astype(np.float32)))
        codes = cast(x.numpy(), scale, name)  # type: ignore[arg-type]
        return _DECODED[name][torch.from_numpy(codes).long()] / torch.from_numpy(scale)

    return rounded


class _Linear(torch.autograd.Function):
    """``x wᵀ`` and its gradients, of rounded operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, rounded: Rounding) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.rounded = rounded
        return rounded(x, "x") @ rounded(w, "w").t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        rounded = ctx.rounded
        w_t = rounded(w.t().contiguous(), "w")
        dw = rounded(dy.t().contiguous(), "dy") @ rounded(x.t().contiguous(), "x").t()
        return rounded(dy, "dy") @ w_t.t(), dw, None


def activated(x: Tensor, name: str) -> Tensor:
    if name not in PLAIN_OF_GATED:
        return ACTIVATIONS[name](x)
    x, gate = x.chunk(2, -1)
    return ACTIVATIONS[PLAIN_OF_GATED[name]](x) * gate


def joined(parameters: Mapping[str, Tensor], leaf: str) -> Any:
    parts = [value for name, value in parameters.items() if name.endswith(leaf) and "layer_norm" not in name]
    return torch.cat(parts) if parts else None


def reference(module: Fused, x: Tensor, activation: str, rounded: Rounding) -> tuple[dict[str, Tensor], list[Tensor]]:
    """y, the bias and the norm's output; and the leaves, x and the parameters in order; in float64."""
    parameters = {name: p.detach().double().requires_grad_() for name, p in module.named_parameters()}
    x = x.detach().double().requires_grad_()
    gamma = parameters["layer_norm_weight"] + (1 if module.norm.zero_centered else 0)
    mean = 0 if module.norm.rms else x.mean(-1, keepdim=True)
    variance = (x - mean).square().mean(-1, keepdim=True)
    normed = (x - mean) / torch.sqrt(variance + module.norm.eps) * gamma
    if not module.norm.rms:
        normed = normed + parameters["layer_norm_bias"]
    rows = normed.flatten(0, -2)
    if isinstance(module, LayerNormLinear):
        bias = joined(parameters, "bias")
        y = _Linear.apply(rows, joined(parameters, "weight"), rounded)
    else:
        bias = parameters.get("fc2_bias")
        h = _Linear.apply(rows, parameters["fc1_weight"], rounded)
        h = h if bias is None else h + parameters["fc1_bias"]
        y = _Linear.apply(activated(h, activation), parameters["fc2_weight"], rounded)
    y = y if bias is None or module.return_bias else y + bias
    return {"y": y.view(*x.shape[:-1], -1), "bias": bias, "norm": normed}, [x, *parameters.values()]


def distances(
    module: Fused, x: Tensor, activation: str = "", rounded: Rounding = unrounded, **context: Any
) -> dict[str, float]:
    """How far outputs and gradients are from :func:`reference`'s, relative to their norms.

    Args:
        context: of ``fp8_autocast``.
    """
    leaf = x.detach().requires_grad_()
    module.zero_grad()
    with fp8_autocast(**context):
        outputs = module(leaf)
    outputs = [outputs] if isinstance(outputs, Tensor) else [*outputs]
    kept = ["y", *(["bias"] * module.return_bias), *(["norm"] * module.return_layernorm_output)]
    assert len(outputs) == len(kept)
    right, leaves = reference(module, x, activation, rounded)
    pairs = {name: (found, right[name]) for name, found in zip(kept, outputs) if found is not None}
    assert ("bias" in kept and right["bias"] is None) == (len(pairs) < len(kept))
    generator = torch.Generator().manual_seed(7)
    along = [torch.randn(found.shape, generator=generator).to(found.dtype) for found, _ in pairs.values()]
    torch.autograd.backward([found for found, _ in pairs.values()], along)
    torch.autograd.backward([other for _, other in pairs.values()], [each.double() for each in along])
    names = ["x", *(f"gradient of {name}" for name, _ in module.named_parameters())]
    for name, found, other in zip(names, [leaf, *module.parameters()], leaves):
        assert found.grad is not None, name
        assert found.grad.dtype == found.dtype, name
        pairs[name] = found.grad, other.grad  # type: ignore[assignment]
    return {name: distance(found, other) for name, (found, other) in pairs.items()}


def distance(found: Tensor, right: Tensor) -> float:
    """The norm of the difference over that of ``right``."""
    assert found.shape == right.shape
    return float((found.detach().double() - right.detach()).norm() / right.detach().norm())


def randomized(module: Any) -> Any:
    """The module with parameters of which none is 0 or 1."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, 0.5 if "layer_norm" in name else 0.0, 0.2)
    return module


def sample(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * 2 + 0.5).to(dtype)
