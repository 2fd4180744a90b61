"""Gated MLPs of other libraries, such as those of Hugging Face's Llama, as one autograd function."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_fp8.fp8_tensor import FP8Tensor
from lightning_fp8.functions.gated_mlp import GatedMLP, GatedMLPFunction
from lightning_fp8.functions.linear import without_gradient
from lightning_fp8.functions.shared_input import input_cast
from lightning_fp8.hf_fusion.fused import (
    FusedModule,
    computes,
    fuse,
    has_global_hooks,
    has_hooks,
    in_transform,
    original_class,
)
from lightning_fp8.modules.linear import Linear
from lightning_fp8.scaled import Role

ACTIVATIONS = {
    ("SiLU", "torch.nn.modules.activation"): "silu",
    ("SiLUActivation", "transformers.activations"): "silu",
    ("GELUTanh", "transformers.activations"): "gelu",
    ("PytorchGELUTanh", "transformers.activations"): "gelu",
}
"""By an activation's class and module, its name in the ops."""
_GATED = {"silu": "swiglu", "gelu": "geglu"}


def layers_of(mlp: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers of a known MLP: gate and up, which may be one layer, and down."""
    return ("gate_up_proj", "down_proj") if "gate_up_proj" in mlp._modules else ("gate_proj", "up_proj", "down_proj")


def _is_whole(weight: Any) -> bool:
    """Whether an op can read the weight: a parameter, or one in FP8, as FSDP2 gathers; not a DTensor."""
    return type(weight) is nn.Parameter or type(weight) is Tensor or isinstance(weight, FP8Tensor)


def _gated(self: Any, x: Any) -> Any:  # templates, of which only the code is read
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj  # noqa: RET504


def _gated_at_once(self: Any, x: Any) -> Any:
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _gated_by_liger(self: Any, x: Any) -> Any:
    return self.down_proj(_swiglu_dispatch(self.gate_proj(x), self.up_proj(x)))  # type: ignore[name-defined]  # noqa: F821


def _gated_by_older_liger(self: Any, x: Any) -> Any:
    return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[name-defined]  # noqa: F821


def _gated_in_halves(self: Any, x: Any) -> Any:
    y = self.gate_up_proj(x)
    gate, y = y.chunk(2, dim=-1)
    y = y * self.activation_fn(gate)
    return self.down_proj(y)


class FusedMLP(FusedModule):
    """A gated MLP whose FP8 layers are one autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., hidden]`` to the same shape."""
        if not self._context().enabled:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        layers = tuple(self._modules[name] for name in layers_of(self))
        activation = self._runs_fused(x, layers)
        self._note(activation is not None)
        if activation is None:
            return super().forward(x)  # type: ignore[misc, no-any-return]
        return _forward(x, cast(tuple[Linear, ...], layers), activation)

    def _runs_fused(self, x: Any, layers: tuple[Any, ...]) -> str | None:
        """The activation, if all layers run in FP8 now, with nothing between them that would have to be called."""
        for layer in layers:
            if not (
                type(layer) is Linear
                and layer.fp8
                and layer.parallel_mode is None
                and not layer.return_bias
                and layer._compiled_call_impl is None
                and "forward" not in layer.__dict__
                and not has_hooks(layer)
                and _is_whole(layer._parameters.get("weight"))
            ):
                return None
        fits = (
            type(x) in (Tensor, nn.Parameter)
            and all(layer._parameters["bias"] is None for layer in layers[:-1])
            and x.numel() > 0
            and self._last_recipe_allows()
            and not has_global_hooks()
            and not in_transform()
        )
        return activation_of(self) if fits else None

    def _last_recipe_allows(self) -> bool:
        return self._context().recipe.backward_override is None


def _forward(x: Tensor, layers: tuple[Linear, ...], activation: str) -> Tensor:
    gate, down = layers[0], layers[-1]
    wg, wd, bd = gate._parameters["weight"], down._parameters["weight"], down._parameters["bias"]
    wu = of_up = None
    assert wg is not None
    assert wd is not None
    context = gate._begin(x, wg, None)
    (of_gate, *_), dtype = gate._products(x, (wg,), (), context, None)
    if len(layers) == 3:
        wu = layers[1]._parameters["weight"]
        assert wu is not None
        layers[1]._begin(x, wu, None)
        (of_up, *_), _ = layers[1]._products(x, (wu,), (), context, None)
    else:
        activation = _GATED[activation]
    down._begin_inside(None)
    (of_down, *_), _ = down._products(x, (wd,), (bd,), context, None)
    shared = None
    if not torch.compiler.is_compiling():
        shared = input_cast(x, dtype, of_gate.recipe, of_gate.slots[Role.INPUT], observe=of_gate.observe)
    if not torch.is_grad_enabled():
        wg, wu, wd = (None if w is None else without_gradient(w) for w in (wg, wu, wd))
    mlp = GatedMLP(activation, of_gate, of_up, of_down, dtype, shared)
    y: Tensor = GatedMLPFunction.apply(mlp, x if x.dtype is dtype else x.to(dtype), wg, wu, wd, bd)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], wd.shape[0])


def is_known_mlp(module: nn.Module) -> bool:
    """Whether the forward of ``module`` is the known formula, also if it is fused already."""
    return _is_ligers(module) or computes(original_class(module).forward, _gated, _gated_at_once, _gated_in_halves)


def _is_ligers(mlp: nn.Module) -> bool:
    return "act_fn" not in mlp._modules and computes(
        original_class(mlp).forward, _gated_by_liger, _gated_by_older_liger
    )


def act_fn_of(mlp: nn.Module) -> nn.Module | None:
    """The activation of a known MLP, as a module; Liger's have none."""
    return mlp._modules.get("activation_fn" if "gate_up_proj" in mlp._modules else "act_fn")


def activation_of(mlp: nn.Module) -> str | None:
    """The ops' name for the activation of a known MLP; None if it is not supported, or has hooks."""
    act_fn = act_fn_of(mlp)
    if act_fn is None:
        return "silu"  # Liger's
    cls = type(act_fn)
    return None if "forward" in vars(act_fn) or has_hooks(act_fn) else ACTIVATIONS.get((cls.__name__, cls.__module__))


def fuse_mlp(mlp: nn.Module) -> None:
    """Make ``mlp`` run as one autograd function, in place."""
    fuse(mlp, FusedMLP)


__all__ = ["ACTIVATIONS", "FusedMLP", "act_fn_of", "activation_of", "fuse_mlp", "is_known_mlp", "layers_of"]
