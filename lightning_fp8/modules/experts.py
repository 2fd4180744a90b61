"""Experts of transformers' models, whose weights are 3-D parameters, in FP8."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8.faster import loop_over
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.grouped import MANY_EXPERTS, GroupedFunction
from lightning_fp8.functions.product import without_gradient
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype
from lightning_fp8.modules.swap import swap_class, unsharded_class
from lightning_fp8.ops.grouped import ends_of
from lightning_fp8.weights.coded import codes_in
from lightning_fp8.weights.fp8_tensor import FP8Tensor

_OF_DECORATOR = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "_apply_gate", "num_experts")
"""What transformers' ``@use_experts_implementation`` gives to a class of experts."""


class Experts(LinearLayer):
    """Mixed in front of a class of transformers' experts, whose forward runs outside FP8.

    ``forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k])``. Tokens are sorted by expert and not
    padded. Ids from the number of experts on are other ranks' experts, whose rows are zeros and in no group.
    """

    _in_high_precision: ClassVar[Callable[..., Tensor]]
    """The forward of the other class."""
    _apply_gate: Callable[[Tensor], Tensor]
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    kind = "experts"

    def forward(self, hidden_states: Tensor, *routing: Tensor, **named: Tensor) -> Tensor:  # type: ignore[override]
        weights = tuple(self._weight(name) for name in self.weight_names)
        context = self._begin(hidden_states, weights[0], None)
        in_fp8 = context.enabled and self.fp8
        calibrating = context.calibrating and self.fp8 and not in_fp8
        is_kept = isinstance(weights[0], FP8Tensor) and not weights[0].is_gathered
        if not (in_fp8 or calibrating or is_kept):
            held = {name: each for name, each in self._parameters.items() if isinstance(each, FP8Tensor)}
            if not held or torch.compiler.is_compiling():
                return self._in_high_precision(hidden_states, *routing, **named)
            try:  # or a rank would gather a weight for each of the experts that have tokens there
                self._parameters.update({name: each * 1 for name, each in held.items()})  # type: ignore[misc, operator]
                return self._in_high_precision(hidden_states, *routing, **named)
            finally:
                self._parameters.update(held)
        dtype = autocast_dtype(hidden_states.device.type) or hidden_states.dtype
        products = self._products(hidden_states, weights, (), context, None)[0] if in_fp8 else []
        for product in products:
            self._refuse_backward_override(product, "experts; leave it out, or skip them")
        top_k_index, top_k_weights = sorted((*routing, *named.values()), key=torch.is_floating_point)
        tokens, top_k = top_k_index.shape
        experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
        ids = torch.arange(len(weights[0]), device=experts.device)
        offs = torch.searchsorted(experts, ids, right=True).to(torch.int32)
        own = (experts < len(ids))[:, None]
        all_are_own = not getattr(self, "_is_expert_parallel", False)

        def multiplied(gemm: int, rows: Tensor) -> Tensor:
            rows = rows if all_are_own else torch.where(own, rows, 0)
            if in_fp8:
                weight = weights[gemm] if torch.is_grad_enabled() else without_gradient(weights[gemm])
                y = GroupedFunction.apply(rows, weight, offs, products[gemm], dtype)
            else:
                y = self._multiplied_by_torch(gemm, rows, weights[gemm], offs, calibrating)
            bias = getattr(self, self.bias_names[gemm]).float() if self.has_bias else None  # adds gradients in float32
            return y if bias is None else y + bias[experts.clamp(max=len(ids) - 1)].to(dtype)

        hidden = multiplied(0, hidden_states.to(dtype)[order // top_k])
        y = multiplied(1, (self._apply_gate if self.has_gate else self.act_fn)(hidden).to(dtype))
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        of_rows = top_k_weights.reshape(-1)[order][:, None]
        # Twice, so that what comes back to rows of nobody is zero, too, whatever the gradient and the weight are.
        weighted = y * of_rows if all_are_own else torch.where(own, y * torch.where(own, of_rows, 0), 0)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return weighted[place].view(tokens, top_k, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _multiplied_by_torch(self, gemm: int, rows: Tensor, weight: Tensor, offs: Tensor, calibrating: bool) -> Tensor:
        """The product in high precision. A weight that is kept in FP8 is dequantized."""
        if calibrating:
            self._observe(gemm, rows, weight)
        *groups, others = rows.tensor_split(ends_of(offs))
        parts = [F.linear(part, each) for part, each in zip(groups, weight)]
        y = torch.cat([*parts, others.new_zeros(len(others), weight.shape[1])])
        return self._observed(gemm, y) if calibrating else y

    def _compared(self, input: Tensor, context: FP8Context) -> str:
        """Rows are not compared. Weights kept in FP8 are dequantized in high precision, which is a loop, too."""
        weight: Any = self._parameters.get(self.weight_names[0])
        many = self.num_experts > MANY_EXPERTS and (not isinstance(weight, FP8Tensor) or weight.is_gathered)
        return loop_over(self.num_experts, input.device, context.recipe.name) if many else ""

    def _weight(self, name: str) -> Tensor:
        """``[E, N, K]``: the parameter, or its transposed view.

        Raises:
            NotImplementedError: If it is computed from FP8 codes of a checkpoint, as by adapters of peft.
        """
        computed: Any = self._modules.get("parametrizations") or {}
        if name in computed and codes_in(computed[name].original) is not None:
            raise NotImplementedError(
                f"an adapter is added to {name} of experts, FP8 codes of a checkpoint, which would be dequantized in "
                "each pass: adapt other layers, target_modules=['q_proj', 'v_proj'] for example ('all-linear' has "
                "experts, too), or load the model with quantization_config=FineGrainedFP8Config(dequantize=True)"
            )
        weight: Tensor = getattr(self, name)
        return weight.mT if self.is_transposed else weight

    @property
    def features(self) -> tuple[int, ...]:
        return tuple(size for shape in self.matrices.values() for size in shape)


def is_experts(module: nn.Module) -> bool:
    """Whether ``module`` is one of transformers' experts with 3-D weights. It does not import transformers."""
    if isinstance(module, Experts):
        return True
    names = weights_of_experts(module) if all(hasattr(module, name) for name in _OF_DECORATOR) else ()
    weights = [module._parameters.get(name) for name in names]
    return bool(weights) and all(weight is not None and weight.dim() == 3 for weight in weights)


def weights_of_experts(module: Any) -> tuple[str, str]:
    """The names of the parameters."""
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def matrices_of_experts(module: Any) -> dict[str, tuple[int, ...]]:
    """``(experts, out_features, in_features)`` of each weight."""
    shapes = {name: tuple(getattr(module, name).shape) for name in weights_of_experts(module)}
    return {name: (e, k, n) if module.is_transposed else (e, n, k) for name, (e, n, k) in shapes.items()}


def swap_experts(module: Any) -> None:
    """Change the class of transformers' experts to its FP8 subclass, in place."""
    names = weights_of_experts(module)
    swap_class(module, fp8_experts(unsharded_class(module), names))
    module.in_features = module.out_features = matrices_of_experts(module)[names[0]][2]


@lru_cache
def fp8_experts(cls: type, names: tuple[str, str]) -> type:
    """The FP8 subclass of ``cls``, whose weights are called ``names``."""
    fields = {
        "__module__": __name__,
        "gemms": names,
        "weight_names": names,
        "matrices": property(matrices_of_experts),
        "bias_names": tuple(f"{name}_bias" for name in names),
        **{f"{name}{scale}": None for name in names for scale in ("_scale_inv", "_scale")},  # see WeightCachingModule
        "_in_high_precision": cls.forward,  # type: ignore[attr-defined]
        "__reduce__": lambda self: (_new, (cls, names), self.__getstate__()),
    }
    return type(cls.__name__, (Experts, cls), fields)


def _new(cls: type, names: tuple[str, str]) -> Any:
    made: Any = fp8_experts(cls, names)
    return made.__new__(made)
