"""The forward pass of linear layers whose three GEMMs run in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_fp8 import autocast, ops
from lightning_fp8.arguments import refuse_transforms, require_bool
from lightning_fp8.arguments.parallel import refuse_sharded
from lightning_fp8.autocast import FP8Context
from lightning_fp8.functions.linear import (
    LinearFunction,
    MainGradFunction,
    ObserveGradFunction,
    Slots,
    mark_stale,
    place_in_graph,
)
from lightning_fp8.functions.shared_input import input_cast
from lightning_fp8.modules.record import note_traced
from lightning_fp8.modules.weight_cache import WeightCachingModule
from lightning_fp8.recipes import DelayedScaling
from lightning_fp8.scaled import LINEAR_ROLES, Role


class LinearLayer(WeightCachingModule):
    """The FP8 forward that linear layers share, whichever class made them; :class:`Linear` is the one to construct.

    Has ``in_features``, ``out_features``, ``weight`` and ``bias`` of the class that it stands in front of.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    # Class-level, so that a torch.nn.Linear retyped in place has them.
    roles = LINEAR_ROLES
    kind: ClassVar[str] = "Linear"
    return_bias: bool = False
    fuse_wgrad_accumulation: bool = False
    bias_names: tuple[str, ...] = ("bias",)
    _last_context: FP8Context | None = None

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype (or torch.autocast's).

        Args:
            input: bfloat16, float16 or float32.
            is_first_microbatch: True casts the weight and keeps the copy, False uses the kept copy unless an optimizer
                has stepped, or the weight was loaded, changed in place or given other ``data``; None casts it and keeps
                nothing. In-place changes of ``weight.data`` itself, outside an optimizer, leave no trace: pass True.
                With ``fuse_wgrad_accumulation`` the first wgrad after True overwrites ``main_grad``, and later ones are
                added.

        Raises:
            TypeError: an input that is not floating point, or of another dtype than the weight outside torch.autocast;
                ``is_first_microbatch`` that is neither None nor a bool.
            ValueError: an input of other features or on another device than the weight.
        """
        weight, bias, context = self._begin(input, is_first_microbatch)
        added_bias = None if self.return_bias else bias
        output = self._multiply(input, weight, added_bias, context, is_first_microbatch)
        return (output, bias) if self.return_bias else output

    def _begin(self, input: Tensor, is_first_microbatch: bool | None) -> tuple[Tensor, Any, FP8Context]:
        """The weight, the bias and the context of a forward, whose arguments are checked."""
        if is_first_microbatch is not None:
            require_bool("is_first_microbatch", is_first_microbatch)
        weight = self._parameter(self.weight_names)
        bias = self._parameter(self.bias_names)
        self._check(input, weight)
        return weight, bias, self._context(input)

    def _multiply(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, context: FP8Context, is_first_microbatch: bool | None
    ) -> Tensor:
        if context.enabled and self.fp8:
            return self._fp8_forward(input, weight, bias, context, is_first_microbatch)
        weight = self._in_main_grad(weight, is_first_microbatch)
        if context.calibrating and not context.enabled and self.fp8:
            return self._calibrating_forward(input, weight, bias)
        return self._high_precision(input, weight, bias)

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes of its products, which tell compiled layers apart."""
        return self.in_features, self.out_features

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` of each of :attr:`gemms`."""
        return {"": (self.out_features, self.in_features)}

    def _context(self, input: Tensor) -> FP8Context:
        """The context that this forward runs under; counted in the record."""
        if torch.compiler.is_compiling():
            context = autocast.current_context()
            if context.enabled and self.fp8:
                note_traced(*self.features)
            return context
        # Recomputation runs in the backward pass: it repeats what its forward did, and counted.
        context = self.running_context()
        if autocast.in_backward():
            return context
        if self._last_context is not context:
            self._last_context = context  # slow in a module, so only where it changes
        rows = input.numel() // self.in_features
        (self._record or self.record).note(context.enabled and self.fp8, rows, self.training)
        return context

    def running_context(self) -> FP8Context:
        """The context that a forward of this layer would run under now, outside compiled code."""
        context = autocast.current_context()
        return (self._last_context or context) if autocast.is_repeating() else context

    def _split_parameters(self, split_rows: Mapping[str, int]) -> None:
        """Put parameters of the given rows, by name, in the place of ``weight`` and ``bias``."""
        sizes = list(split_rows.values())
        weights = self.weight.detach().split(sizes)
        biases = self.bias.detach().split(sizes) if self.bias is not None else [None] * len(sizes)
        del self.weight, self.bias
        for name, weight, bias in zip(split_rows, weights, biases):
            self.register_parameter(f"{name}_weight", nn.Parameter(weight.clone()))
            self.register_parameter(f"{name}_bias", nn.Parameter(bias.clone()) if bias is not None else None)
        self.weight_names = tuple(f"{name}_weight" for name in split_rows)
        self.bias_names = tuple(f"{name}_bias" for name in split_rows)

    def weights_and_biases(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The weights and the biases, as they are registered."""
        return [getattr(self, name) for name in self.weight_names], [getattr(self, name) for name in self.bias_names]

    def _parameter(self, names: tuple[str, ...]) -> Any:
        if len(names) == 1:
            return getattr(self, names[0])
        parts = [getattr(self, name) for name in names]
        return torch.cat(parts) if parts[0] is not None else None

    def _fp8_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, context: FP8Context, is_first_microbatch: bool | None
    ) -> Tensor:
        refuse_transforms(self.kind, input, weight, bias)
        recipe = context.recipe
        (slots, *_), dtype, observe = self._enter_fp8(context, input, weight)
        x = input.to(dtype)
        cached = self._cached_weight(weight, self.weight_names, recipe, slots, observe, is_first_microbatch, context)
        main_grad = self._main_grad(weight, is_first_microbatch) if self.fuse_wgrad_accumulation else None
        grad = torch.is_grad_enabled()
        if not grad and weight.requires_grad:
            weight = weight.detach()  # else the function casts for a gradient that nobody asks for
        place = place_in_graph(x) if grad and weight.requires_grad else None
        shared = None
        if not torch.compiler.is_compiling():
            shared = input_cast(input, dtype, recipe, slots[Role.INPUT], observe=observe)
        y = LinearFunction.apply(x, weight, bias, recipe, slots, observe, dtype, cached, main_grad, place, shared)
        # Here, not in the function: views that one makes cannot be changed in place.
        return y if input.dim() == 2 else y.view(*input.shape[:-1], self.out_features)

    def _enter_fp8(
        self, context: FP8Context, input: Tensor, *weights: Tensor
    ) -> tuple[tuple[Slots, ...], torch.dtype, bool]:
        """The slots of the GEMMs, the dtype of their results, and whether casts feed the slots."""
        for weight in weights:
            refuse_sharded(self.kind, input=input, weight=weight)
        if input.layout is not torch.strided:
            raise TypeError(
                f"{self.kind} takes dense tensors in FP8, not sparse or nested ones; x.to_dense(), or pad them"
            )
        slots = self._slots or self.ensure_slots(input.device)
        observe = torch.is_grad_enabled() and self.training and context.observe
        if isinstance(context.recipe, DelayedScaling) and not torch.compiler.is_compiling():
            history = slots[0][Role.INPUT].history
            if observe and history.recipe is not context.recipe:
                history.follow(context.recipe)
            elif not observe and context.observe and torch.is_grad_enabled():
                history.trained_in_eval |= any(weight.requires_grad for weight in weights)
        return slots, autocast_dtype(input.device.type) or input.dtype, observe

    def _calibrating_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, gemm: int = 0) -> Tensor:
        refuse_transforms(self.kind, input, weight, bias)
        slots = self.ensure_slots(input.device)[gemm]
        ops.observe(input.detach(), slots[Role.INPUT].amax)
        ops.observe(weight.detach(), slots[Role.WEIGHT].amax)
        slots[Role.INPUT].history.forget_marks()
        if not torch.compiler.is_compiling():
            slots[Role.INPUT].history.note_thread()
        output = self._high_precision(input, weight, bias)
        return ObserveGradFunction.apply(output, slots[Role.GRAD_OUTPUT]) if output.requires_grad else output

    def _high_precision(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def _in_main_grad(self, weight: Tensor, is_first_microbatch: bool | None) -> Tensor:
        """The weight of a product in high precision; a view that passes wgrad on where that goes to ``main_grad``."""
        main_grad = self._main_grad(weight, is_first_microbatch) if self.fuse_wgrad_accumulation else None
        view: Tensor = weight if main_grad is None else MainGradFunction.apply(weight, main_grad)
        return view

    def _main_grad(self, weight: Tensor, is_first_microbatch: bool | None) -> Tensor | None:
        """``weight.main_grad`` if wgrad goes there; of a first micro-batch it is stale until the first wgrad."""
        main_grad = getattr(weight, "main_grad", None)
        grad = torch.is_grad_enabled()
        # Reentrant checkpointing computes its forward without gradients, and every kind of it repeats the forward in
        # the backward pass, after others may have added their wgrad.
        if is_first_microbatch and isinstance(main_grad, Tensor) and (grad or self.training):
            if torch.compiler.is_compiling():
                main_grad.zero_()
            elif not autocast.in_backward():
                mark_stale(main_grad)
        if not (weight.requires_grad and grad):
            return None
        if not isinstance(main_grad, Tensor) or main_grad.dtype != torch.float32 or main_grad.shape != weight.shape:
            raise ValueError(
                "fuse_wgrad_accumulation=True needs weight.main_grad, a float32 tensor of shape "
                f"{tuple(weight.shape)}; set it, for example linear.weight.main_grad = torch.zeros_like(linear.weight, "
                "dtype=torch.float32), and do not combine it with parameters_split"
            )
        return main_grad

    def _check(self, input: Tensor, weight: Tensor) -> None:
        if not isinstance(input, Tensor):
            raise TypeError(f"{self.kind} takes a tensor, not {type(input).__name__}")
        if not input.is_floating_point():
            raise TypeError(
                f"{self.kind} got an input of {input.dtype}; it takes floating-point tensors: cast it, x.bfloat16()"
            )
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            raise ValueError(
                f"{self.kind} has in_features={self.in_features}, but the input has shape {tuple(input.shape)}; its "
                "last dimension must be in_features"
            )
        if input.device != weight.device:
            raise ValueError(
                f"{self.kind}'s weight is on {weight.device} and the input on {input.device}; move one to the other"
                + ("; a meta weight has no values yet: call module.to_empty(device=...)" if weight.is_meta else "")
            )
        if input.dtype != weight.dtype and not autocast_dtype(input.device.type):
            raise TypeError(
                f"{self.kind}'s weight is {weight.dtype} and the input {input.dtype}; cast one of them, or run under "
                "torch.autocast"
            )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype that torch.autocast computes in on this device; None where it is off or unknown."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)
