"""Gated MLPs of other libraries, such as those of Hugging Face's Llama, as one autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from lightning_fp8 import ops
from lightning_fp8.convert.fused import liger
from lightning_fp8.convert.fused.fused import (
    FusedModule,
    computes,
    has_hooks,
    name_of,
    original_class,
    why_not_input,
)
from lightning_fp8.fp8_region import FP8Context
from lightning_fp8.functions.gated_mlp import GatedMLP, GatedMLPFunction
from lightning_fp8.functions.product import without_gradient
from lightning_fp8.functions.shared_input import input_cast
from lightning_fp8.modules.linear import Linear
from lightning_fp8.modules.linear_layer import LinearLayer, autocast_dtype
from lightning_fp8.numerics.scaled import Role
from lightning_fp8.weights.fp8_tensor import FP8Tensor

ACTIVATIONS = {
    ("SiLU", "torch.nn.modules.activation"): "silu",
    ("SiLUActivation", "transformers.activations"): "silu",
    ("GELUTanh", "transformers.activations"): "gelu",
    ("PytorchGELUTanh", "transformers.activations"): "gelu",
}
"""By an activation's class and module, its name in the ops."""
_GATED = {"silu": "swiglu", "gelu": "geglu"}
"""By the name of an activation, that of the op for one tensor of both halves."""


def layers_of(mlp: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers of a known MLP: gate and up, which may be one layer, and down."""
    return ("gate_up_proj", "down_proj") if "gate_up_proj" in mlp._modules else ("gate_proj", "up_proj", "down_proj")


def act_fn_of(mlp: nn.Module) -> Any:
    """The activation of a known MLP; None for Liger's, which have none."""
    return getattr(mlp, "activation_fn" if "gate_up_proj" in mlp._modules else "act_fn", None)


# --- Templates, of which only the code is read ------------------------------------------------------------------------


def _gated(self: Any, x: Any) -> Any:
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj


def _gated_at_once(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _gated_in_halves(self: Any, x: Any) -> Any:
    y = self.gate_up_proj(x)
    gate, y = y.chunk(2, dim=-1)
    y = y * self.activation_fn(gate)
    return self.down_proj(y)


def is_known_mlp(module: nn.Module) -> bool:
    """Whether the formula of ``module`` is known, also if it is fused already."""
    forward = getattr(original_class(module), "forward", None)  # TorchScript's class raises
    known = computes(forward, _gated, _gated_at_once, _gated_in_halves)
    return known or ("act_fn" not in module._modules and computes(forward, *liger.MLPS))


def activation_of(mlp: nn.Module) -> str | None:
    """The ops' name for the activation of a known MLP; None if it is not supported, or has hooks."""
    act_fn = act_fn_of(mlp)
    if act_fn is None:
        names = original_class(mlp).forward.__code__.co_names  # type: ignore[attr-defined]
        return "gelu" if "LigerGELUMulFunction" in names else "silu"
    cls = type(act_fn)
    is_own = isinstance(act_fn, nn.Module) and "forward" not in vars(act_fn) and not has_hooks(act_fn)
    return ACTIVATIONS.get((cls.__name__, cls.__module__)) if is_own else None


# --- The module -------------------------------------------------------------------------------------------------------


class FusedMLP(FusedModule):
    """A gated MLP whose FP8 layers are one autograd function in an FP8 context."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        if torch.compiler.is_exporting() or not self._fuses(lambda context: self._why_not_now(x, context)):
            return super().forward(x)  # type: ignore[misc, no-any-return]
        modules = self._modules
        gate, down = modules.get("gate_up_proj") or modules["gate_proj"], modules["down_proj"]
        return _forward(x, gate, modules.get("up_proj"), down, activation_of(self))  # type: ignore[arg-type]

    @property
    def features(self) -> tuple[int, ...]:
        """Those of its last layer, which notes that it is compiled."""
        down = self._modules.get("down_proj")
        return down.features if isinstance(down, LinearLayer) else ()

    def _why_not_now(self, x: Any, context: FP8Context) -> str:
        """The reason why a call of a layer, or a tensor between layers, is needed; an empty string if none is."""
        for name in layers_of(self):
            if reason := _why_not(name, self._modules.get(name)):
                return reason
        if activation_of(self) is None:
            return "its act_fn was replaced or has hooks"
        if _has_any_global_hook():
            return "hooks of all modules are registered"
        if context.recipe.backward_override is not None:
            return f"its layers compute the gradients of backward_override={context.recipe.backward_override!r}"
        dtype = self._modules["down_proj"]._weight_and_bias()[0].dtype  # type: ignore[union-attr, operator]
        if isinstance(x, Tensor) and dtype is not x.dtype and not autocast_dtype(x.device.type):
            return f"down_proj's weight is {dtype} and its input {x.dtype}"  # which it refuses
        return why_not_input(x)


def _why_not(name: str, layer: Any) -> str:
    """The reason why ``layer`` has to be called; an empty string if its products are enough."""
    if type(layer) is not Linear:
        return f"its {name} is a {name_of(layer)}"
    if not layer.fp8:
        return f"{name} runs in BF16"
    if layer.slower and layer.stays_in_high_precision:
        return layer.slower
    if has_hooks(layer):
        return f"{name} has hooks"
    if "forward" in vars(layer):
        return f"the forward of {name} was replaced on the instance"
    if layer._compiled_call_impl is not None:
        return f"{name} is compiled by itself"
    if layer.parallel_mode is not None or layer.return_bias:
        return f"{name} has parallel_mode or return_bias"
    weight, bias = layer._weight_and_bias()
    if not (type(weight) is nn.Parameter or type(weight) is Tensor or isinstance(weight, FP8Tensor)):
        return f"the weight of {name} is a {type(weight).__name__}"
    return why_not_bias(name, bias)


def why_not_bias(name: str, bias: Any) -> str:
    """The reason why a layer ``name`` with this bias is not fused; an empty string if it is."""
    if bias is None or name == "down_proj":
        return ""
    return f"{name} has a bias, whose gradient needs a tensor that would not be written"


def _forward(x: Tensor, gate: Linear, up: Linear | None, down: Linear, activation: str) -> Tensor:
    (wg, _), (wd, bd) = gate._weight_and_bias(), down._weight_and_bias()
    wu = of_up = None
    context = gate._begin(x, wg, None)
    if up is not None:
        wu, _ = up._weight_and_bias()
        up._begin(x, wu, None)
    down._begin_region(x)
    (of_gate, *_), dtype = gate._products(x, (wg,), (), context, None)
    if up is not None and wu is not None:
        (of_up, *_), _ = up._products(x, (wu,), (), context, None)
    (of_down, *_), _ = down._products(x, (wd,), (bd,), context, None)
    shared = None
    if not torch.compiler.is_compiling():
        shared = input_cast(x, dtype, of_gate.recipe, of_gate.slots[Role.INPUT], observe=of_gate.observe)
    if x.dtype not in ops.HIGH_PRECISION:  # float64 under autocast
        x = x.to(dtype)
    if not torch.is_grad_enabled():
        wg, wd = without_gradient(wg), without_gradient(wd)
        wu = None if wu is None else without_gradient(wu)
    mlp = GatedMLP(activation if up is not None else _GATED[activation], of_gate, of_up, of_down, dtype, shared)
    y: Tensor = GatedMLPFunction.apply(mlp, x, wg, wu, wd, bd)  # type: ignore[no-untyped-call]
    return y if x.dim() == 2 else y.view(*x.shape[:-1], wd.shape[0])
