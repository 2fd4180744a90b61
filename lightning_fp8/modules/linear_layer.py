"""The forward pass of linear layers whose three GEMMs run in FP8 inside ``fp8_autocast``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from lightning_fp8 import fp8_region, ops
from lightning_fp8.arguments import is_dtensor, refuse_sharded, refuse_transforms, require_bool
from lightning_fp8.faster import AWAITED, compared, least_rows
from lightning_fp8.fp8_region import DISABLED, FP8Context
from lightning_fp8.functions.linear import HighPrecisionGradientsFunction, LinearFunction, ObserveGradFunction
from lightning_fp8.functions.main_grad import Delayed, MainGrad, RedirectedFunction, mark_stale
from lightning_fp8.functions.product import Product, without_gradient
from lightning_fp8.functions.shared_input import input_cast
from lightning_fp8.modules.record import note_traced_outside_fp8
from lightning_fp8.modules.weight_cache import WeightCachingModule
from lightning_fp8.numerics.formats import CODES_NEED_SCALES, holds_codes
from lightning_fp8.numerics.recipes import DelayedScaling
from lightning_fp8.numerics.scaled import LINEAR_ROLES, Role
from lightning_fp8.parallel.sharded_linear import sharded_linear
from lightning_fp8.traced import note_traced
from lightning_fp8.weights.fp8_tensor import FP8Tensor
from lightning_fp8.weights.model_init import concatenated

_TENSORS = (Tensor, nn.Parameter)
_functorch_is_active = torch._C._are_functorch_transforms_active


class LinearLayer(WeightCachingModule):
    """The FP8 forward pass that all linear layers inherit. Construct a :class:`Linear` to use it.

    ``in_features``, ``out_features``, ``weight`` and ``bias`` come from the other base class.
    """

    in_features: int
    out_features: int
    weight: Tensor
    bias: Any
    # Class attributes, so that a torch.nn.Linear whose class is swapped in place has them.
    roles = LINEAR_ROLES
    kind: ClassVar[str] = "Linear"
    return_bias: bool = False
    fuse_wgrad_accumulation: bool = False
    delayed_wgrads: tuple[Delayed, ...] | None = None
    """With ``delay_wgrad_compute``, the gradients that :meth:`backward_dw` computes, for each of :attr:`gemms`."""
    wgrad_accumulation_and_reduce_hooks: tuple[Callable[[], Any], ...] = ()
    bias_names: tuple[str, ...] = ("bias",)
    output_layout: Any = None
    """The DTensor placement of a row-parallel layer's output; None leaves the output a partial sum."""
    _last_context: FP8Context | None = None
    _last_products: list[Product] | None = None
    """The products of the last FP8 forward without cached weights; reused while recipe and slots are unchanged."""

    def forward(self, input: Tensor, is_first_microbatch: bool | None = None) -> Tensor | tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """``[..., in_features]`` to ``[..., out_features]`` in the input's dtype (or torch.autocast's).

        Args:
            input: a bfloat16, float16 or float32 tensor.
            is_first_microbatch: True casts the weight and caches the result. False uses the cached weight unless it is
                stale: an optimizer has stepped, or the weight was loaded, changed in place or assigned a new ``data``.
                None casts the weight and caches nothing. In-place changes of ``weight.data`` outside an optimizer
                cannot be detected; pass True after them. With ``fuse_wgrad_accumulation`` the first wgrad after True
                overwrites ``main_grad`` and later ones are added, unless ``weight.overwrite_main_grad`` is True: then
                each one overwrites.

        Raises:
            TypeError: If the input is not floating point, if its dtype differs from the weight's outside
                torch.autocast, or if ``is_first_microbatch`` is neither None nor a bool.
            ValueError: If the input's number of features or its device does not match the weight.
        """
        weight, bias = self._weight_and_bias()
        context = self._begin(input, weight, is_first_microbatch)
        added_bias = None if self.return_bias else bias
        if not (context.enabled and self.fp8):
            output = self._forward_outside_fp8(input, weight, added_bias, context, is_first_microbatch)
            return (output, bias) if self.return_bias else output
        (product, *_), dtype = self._products(input, (weight,), (added_bias,), context, is_first_microbatch)
        # Under autocast, the cast to FP8 reads the input as it is; anything else reads it in autocast's dtype.
        sharded = type(weight) is not nn.Parameter and is_dtensor(weight)
        casts = input.dtype in ops.HIGH_PRECISION and product.recipe.backward_override is None and not sharded
        x = input if casts or input.dtype is dtype else input.to(dtype)
        if sharded:
            self._refuse_backward_override(product, "layers whose weight is a DTensor; leave it out")
            y = sharded_linear(x, weight, added_bias, product, dtype, self.output_layout)
            return (y, bias) if self.return_bias else y
        shared = None
        if not torch.compiler.is_compiling():
            shared = input_cast(input, dtype, product.recipe, product.slots[Role.INPUT], observe=product.observe)
        y = self._multiplied(x, weight, added_bias, product, dtype, shared)
        if input.dim() != 2:  # views that an autograd function returns cannot be changed in place
            y = y.view(*input.shape[:-1], weight.shape[0])
        return (y, bias) if self.return_bias else y

    def _forward_outside_fp8(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, context: FP8Context, is_first_microbatch: bool | None
    ) -> Tensor:
        weight = self._redirected(weight, is_first_microbatch)
        if context.calibrating and not context.enabled and self.fp8:
            return self._calibrating_forward(input, weight, bias)
        return self._high_precision(input, weight, bias)

    def _multiplied(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, dtype: torch.dtype, shared: Any = None
    ) -> Tensor:
        """``x wᵀ + bias [R, N]``, with the gradients that the recipe asks for."""
        if not torch.is_grad_enabled():
            weight = without_gradient(weight)  # or the function would cast operands that only wgrad needs
        in_fp8 = product.recipe.backward_override is None
        function: Any = LinearFunction if in_fp8 else HighPrecisionGradientsFunction
        y: Tensor = function.apply(x, weight, bias, product, dtype, shared)
        return y

    def _refuse_backward_override(self, product: Product, instead: str) -> None:
        """Raises:
        NotImplementedError: If the recipe sets ``backward_override``.
        """
        if (override := product.recipe.backward_override) is not None:
            raise NotImplementedError(f"backward_override={override!r} is not supported by {instead}")

    @property
    def features(self) -> tuple[int, ...]:
        """The sizes of its products. They identify compiled layers; see :mod:`lightning_fp8.traced`."""
        return self.in_features, self.out_features

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """``(out_features, in_features)`` for each of :attr:`gemms`."""
        return {"": (self.out_features, self.in_features)}

    def _begin(
        self, input: Tensor, weight: Tensor, is_first_microbatch: bool | None, second: Tensor | None = None
    ) -> FP8Context:
        """Check the arguments of a forward, count it in the record, and return the context that it runs under.

        With a ``weight``, or ``second`` weight, of another package's class, this is :data:`DISABLED`, and for sizes
        for which FP8 is slower.
        """
        if is_first_microbatch is not None:
            require_bool("is_first_microbatch", is_first_microbatch)
        foreign = (type(weight) not in _TENSORS and is_foreign(weight)) or (second is not None and is_foreign(second))
        if not foreign and (
            type(input) not in _TENSORS
            or input.dtype is not weight.dtype
            or not input.dim()
            or input.shape[-1] != self.in_features
            or input.device != weight.device
            or not input.is_floating_point()
        ):
            self._check(input, weight)
        return self._begin_region(input, foreign)

    def _begin_region(self, input: Tensor, foreign: bool = False) -> FP8Context:
        """:meth:`_begin` without checks, of a forward of as many rows as ``input [..., features]`` has."""
        if torch.compiler.is_compiling():
            context = fp8_region.current_context(self.own_context)
            if self.fp8 and not foreign and not self.slower:
                if context.enabled:
                    note_traced(*self.features)
                else:
                    note_traced_outside_fp8(*self.features)
            return DISABLED if foreign or self.slower else context
        context, in_backward = fp8_region.context_of_forward(self._last_context, self.own_context)
        kept = bool(self.slower) and (not in_backward or self._ran_slower)
        record, in_fp8 = self._record or self.record, context.enabled and self.fp8 and not (foreign or kept)
        if record.watch is not None and not record.watch.settled:
            record.note_region(in_fp8, context.outside)
        if in_backward:  # recomputation, which repeats a forward that has been counted
            return DISABLED if foreign or kept else context
        if self._ran_slower is not kept:
            self._ran_slower = kept
        if self._last_context is not context:
            self._last_context = context  # setting a module's attribute is slow, so only a change is set
        record.note(in_fp8, self.training)
        if context is self.own_context:
            slot = self.ensure_slots(input.device)[0][self.roles[0]]
            watch = slot.history.watch
            if watch.lead is None or watch.lead == slot.index:
                watch.lead = slot.index
                fp8_region.own_forward_begins(context, slot.history)
        if self.comparison == AWAITED and in_fp8 and self.training and context.observe:
            self.comparison = self._compared(input, context)
        return DISABLED if foreign or kept else context

    @property
    def stays_in_high_precision(self) -> bool:
        """Whether :attr:`slower` applies to the current forward. A recomputed one runs as its forward did."""
        if not self.slower or torch.compiler.is_compiling():
            return bool(self.slower)
        return self._ran_slower or not fp8_region.in_backward()

    def _compared(self, input: Tensor, context: FP8Context) -> str:
        if is_dtensor(self._parameters.get("weight")):
            return ""
        limit = least_rows(input.device, context.recipe.name, *self.matrices[""])
        return compared(*limit, input.numel() // input.shape[-1])

    def running_context(self) -> FP8Context:
        """The context that a forward of this layer would currently run under."""
        if self.stays_in_high_precision:
            return DISABLED
        if torch.compiler.is_compiling():  # a look at the weights would compile the caller again for each layer
            return fp8_region.current_context(self.own_context)
        if any(is_foreign(self._parameters.get(name)) for name in self.weight_names):
            return DISABLED
        return fp8_region.context_of_forward(self._last_context, self.own_context)[0]

    def _split_parameters(self, split_rows: Mapping[str, int]) -> None:
        """Replace ``weight`` and ``bias`` by several parameters, given their names and numbers of rows."""
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
        """The registered weights and biases."""
        return [getattr(self, name) for name in self.weight_names], [getattr(self, name) for name in self.bias_names]

    def _weight_and_bias(self) -> tuple[Tensor, Any]:
        """The weight ``[N, K]`` and the bias; split parameters are concatenated."""
        if len(self.weight_names) == 1:
            (weight,), (bias,) = self.weight_names, self.bias_names
            own = self._parameters  # faster than a module's __getattr__
            return (
                own[weight] if weight in own else getattr(self, weight),  # type: ignore[return-value]
                own[bias] if bias in own else getattr(self, bias),
            )
        weights, biases = self.weights_and_biases()
        if any(map(is_foreign, weights)):
            raise TypeError(
                f"{self.kind} with parameters_split: {foreign_weight(self)}, which cannot be concatenated; leave this "
                "layer out of the call that replaced its weights"
            )
        return concatenated(weights), None if biases[0] is None else torch.cat(biases)  # type: ignore[arg-type]

    def _products(
        self,
        input: Tensor,
        weights: tuple[Tensor, ...],
        others: tuple[Tensor | None, ...],
        context: FP8Context,
        is_first_microbatch: bool | None,
    ) -> tuple[list[Product], torch.dtype]:
        """The product of each of :attr:`gemms` in this forward, and the dtype of the results.

        Args:
            weights: the weight of each of :attr:`gemms`.
            others: all other tensors that the layer computes with.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            if _functorch_is_active() or forward_ad._current_level >= 0:
                refuse_transforms(self.kind, input, *weights, *others)
            for weight in weights:
                if type(weight) is not nn.Parameter or type(input) not in _TENSORS:
                    self._check_sharded(input, weight)
        if input.layout is not torch.strided:
            raise TypeError(
                f"{self.kind} does not support sparse or nested tensors in FP8: call x.to_dense(), or pad them"
            )
        slots = self._slots or self.ensure_slots(input.device)
        recipe, grad = context.recipe, torch.is_grad_enabled()
        observe = grad and self.training and context.observe
        if not compiling and isinstance(recipe, DelayedScaling):
            history = slots[0][Role.INPUT].history
            if observe:
                history.follow(recipe)
            elif grad and context.observe:
                history.watch.trained_in_eval |= any(weight.requires_grad for weight in weights)
        products = [] if compiling else self._last_products or []  # compiled code would have guards on them
        first = products[0] if products else None
        if first is None or first.recipe is not recipe or first.slots is not slots[0] or first.observe is not observe:
            products = [Product(recipe, of_gemm, observe) for of_gemm in slots]
            if not compiling:
                self._last_products = products  # setting a module's attribute is slow, so only a change is set
        caches = not compiling and (  # compiled code would have guards on the cache
            is_first_microbatch is not None or context.weight_period is not None or bool(self._weight_cache)
        )
        if caches or self.fuse_wgrad_accumulation or self.delayed_wgrads is not None:
            products = [
                each.redirected(
                    self._cached_weight(weight, names, each, is_first_microbatch, context) if caches else None,
                    self._main_grad(weight, is_first_microbatch),
                    None if self.delayed_wgrads is None else self.delayed_wgrads[gemm],
                )
                for gemm, (each, weight, names) in enumerate(zip(products, weights, self._names_of_weights()))
            ]
        return products, autocast_dtype(input.device.type) or input.dtype

    def _names_of_weights(self) -> list[tuple[str, ...]]:
        """For each of :attr:`gemms`, the names of the parameters that hold its weight's rows."""
        return [self.weight_names] if len(self.gemms) == 1 else [(name,) for name in self.weight_names]

    def _check_sharded(self, input: Tensor, weight: Tensor) -> None:
        """Raises:
        TypeError: If the input is a DTensor, which this kind of layer does not support.
        """
        if not is_dtensor(weight):
            refuse_sharded(self.kind, input=input)

    def _calibrating_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None, gemm: int = 0) -> Tensor:
        refuse_transforms(self.kind, input, weight, bias)
        refuse_sharded(self.kind, input=input, weight=weight)
        self._observe(gemm, input, weight)
        return self._observed(gemm, self._high_precision(input, weight, bias))

    def _observe(self, gemm: int, x: Tensor, weight: Tensor) -> None:
        """Calibrate: observe the amaxes of the operands of one of :attr:`gemms`."""
        slots = self.ensure_slots(x.device)[gemm]
        ops.observe(x.detach(), slots[Role.INPUT].amax)
        ops.observe(weight.detach(), slots[Role.WEIGHT].amax)
        slots[Role.INPUT].history.calibrated = True

    def _observed(self, gemm: int, y: Tensor) -> Tensor:
        """Calibrate: return ``y``, with a backward that observes the amax of its gradient."""
        slot = self.ensure_slots(y.device)[gemm][Role.GRAD_OUTPUT]
        observed: Tensor = ObserveGradFunction.apply(y, slot) if y.requires_grad else y
        return observed

    def _high_precision(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(input, weight, bias)

    def _redirected(self, weight: Tensor, is_first_microbatch: bool | None, gemm: int = 0) -> Tensor:
        """The weight for a product in high precision.

        If wgrad is delayed or accumulated in ``main_grad``, it is a view whose backward redirects the gradient.
        """
        if is_foreign(weight):
            return weight
        main_grad = self._main_grad(weight, is_first_microbatch)
        delayed = None if self.delayed_wgrads is None or not torch.is_grad_enabled() else self.delayed_wgrads[gemm]
        if main_grad is None and delayed is None:
            return weight
        view: Tensor = RedirectedFunction.apply(weight, main_grad, delayed)
        return view

    def backward_dw(self) -> None:
        """With ``delay_wgrad_compute``, compute the weights' gradients of the oldest pending backward pass.

        They are added to ``grad``, or to ``main_grad``. In high precision the backward pass has already computed them,
        and this method only adds them. Call it once for each forward pass with gradients.

        Raises:
            RuntimeError: If no backward pass is pending.
            NotImplementedError: If weights are sharded.
        """
        if self.delayed_wgrads is None or not any(weight.requires_grad for weight in self.weights_and_biases()[0]):
            return
        for delayed, of_gemm in zip(self.delayed_wgrads, self._names_of_weights()):
            weights = [getattr(self, name) for name in of_gemm]
            if any(map(is_dtensor, weights)):
                raise NotImplementedError(
                    "delay_wgrad_compute=True is not supported for DTensor weights, such as FSDP2's: FSDP2 reduces "
                    "gradients in the backward pass; leave it out"
                )
            if not delayed:
                if not any(weight.requires_grad for weight in weights):
                    continue
                raise RuntimeError(
                    "backward_dw() has no backward pass to complete: call it once for each forward and backward pass"
                )
            with torch.no_grad():
                gradient = delayed.popleft()()
                if gradient is not None and not self.fuse_wgrad_accumulation:
                    for weight, piece in zip(weights, gradient.split([len(weight) for weight in weights])):
                        if weight.requires_grad:
                            weight.grad = piece if weight.grad is None else weight.grad.add_(piece)
        for hook in self.wgrad_accumulation_and_reduce_hooks:
            hook()

    def need_backward_dw(self) -> bool:
        """Whether the layer was constructed with ``delay_wgrad_compute``."""
        return self.delayed_wgrads is not None

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call ``hook`` after each :meth:`backward_dw`, as Megatron's DistributedDataParallel asks."""
        self.wgrad_accumulation_and_reduce_hooks = (*self.wgrad_accumulation_and_reduce_hooks, hook)

    def _delay_wgrads(self, delays: bool) -> None:
        """Whether to delay the gradients of weights until :meth:`backward_dw`."""
        self.delayed_wgrads = tuple(deque() for _ in self.gemms) if delays else None

    def _main_grad(self, weight: Tensor, is_first_microbatch: bool | None) -> MainGrad | None:
        """``weight.main_grad`` if wgrad is accumulated in it.

        The forward of a first micro-batch marks it stale, so that the first wgrad overwrites it.
        """
        if self.delayed_wgrads is not None and torch.compiler.is_compiling():
            raise NotImplementedError("torch.compile does not support delay_wgrad_compute=True; leave it out")
        if not self.fuse_wgrad_accumulation:
            return None
        main_grad = getattr(weight, "main_grad", None)
        grad = torch.is_grad_enabled()
        # Reentrant checkpointing runs the forward without gradients. All checkpointing repeats the forward in the
        # backward pass, when other micro-batches may already have added their wgrad.
        if is_first_microbatch and isinstance(main_grad, Tensor) and (grad or self.training):
            if torch.compiler.is_compiling():
                main_grad.zero_()
            elif not fp8_region.in_backward():
                mark_stale(main_grad)
        if not (weight.requires_grad and grad):
            return None
        fits = isinstance(main_grad, Tensor) and main_grad.dtype in ops.HIGH_PRECISION
        if not fits or main_grad.shape != weight.shape:  # type: ignore[union-attr]
            raise ValueError(
                "fuse_wgrad_accumulation=True needs weight.main_grad, a float32, bfloat16 or float16 tensor of shape "
                f"{tuple(weight.shape)}; set it, for example linear.weight.main_grad = torch.zeros_like(linear.weight, "
                "dtype=torch.float32), and do not combine it with parameters_split"
            )
        return MainGrad(weight, main_grad)  # type: ignore[arg-type]

    def _check(self, input: Tensor, weight: Tensor) -> None:
        if not isinstance(input, Tensor):
            raise TypeError(f"{self.kind} takes a tensor, not {type(input).__name__}")
        if not input.is_floating_point():
            raise TypeError(
                f"{self.kind} got an input of {input.dtype}; it takes floating-point tensors: cast it, x.bfloat16()"
            )
        # Without gradients, transformers' tensor parallelism replaces DTensors by their local shards.
        if input.dim() == 0 or input.shape[-1] not in (self.in_features, weight.shape[-1]):
            raise ValueError(
                f"{self.kind} has in_features={self.in_features}, but the input has shape {tuple(input.shape)}; its "
                "last dimension must be in_features"
            )
        if input.device != weight.device:
            raise ValueError(
                f"{self.kind}'s weight is on {weight.device} and the input on {input.device}; move one to the other"
                + ("; a meta weight has no values yet: call module.to_empty(device=...)" if weight.is_meta else "")
            )
        if holds_codes(weight):
            raise TypeError(f"{self.kind}'s weight is {weight.dtype}: {CODES_NEED_SCALES}")
        if input.dtype != weight.dtype and not autocast_dtype(input.device.type):
            raise TypeError(
                f"{self.kind}'s weight is {weight.dtype} and the input {input.dtype}; cast one of them, or run under "
                "torch.autocast"
            )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch.autocast on this device; None if autocast is disabled or does not support the device."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def foreign_weight(module: nn.Module) -> str:
    """The reason why the class of a weight of ``module`` keeps it in high precision; an empty string if none does."""
    computed = module._modules.get("parametrizations", ())
    for name in getattr(module, "weight_names", ("weight",)):
        weight = None if name in computed else getattr(module, name, None)  # type: ignore[operator]
        if is_foreign(weight):
            cls = type(_local(weight)).__name__
            return f"its {name} is {'an' if cls[0] in 'AEIOUaeiou' else 'a'} {cls}"
    return ""


def is_foreign(weight: Any) -> bool:
    """Whether ``weight`` has a tensor class that computes or converts itself, as torchao's and bitsandbytes' have.

    Such a weight is not cast: it is multiplied by ``torch.nn.functional.linear``, which calls its class. Classes of
    torch's tracing, sharding and lazy initialization, and those of this package, are not meant.
    """
    return type(weight) not in _TENSORS and isinstance(weight, Tensor) and _computes_itself(type(_local(weight)))


def _local(weight: Any) -> Any:
    return weight._local_tensor if is_dtensor(weight) and not torch.compiler.is_compiling() else weight


@torch.compiler.assume_constant_result
def _computes_itself(cls: type) -> bool:
    return _defines_operations(cls)


@cache
def _defines_operations(cls: type) -> bool:
    if issubclass(cls, FP8Tensor) or cls.__module__.startswith(_NOT_FOREIGN):
        return False
    own = (vars(base) for base in cls.__mro__ if base not in nn.Parameter.__mro__)
    return any({"__torch_dispatch__", "__torch_function__", "to"} & names.keys() for names in own)


_NOT_FOREIGN = (
    *("torch._subclasses.", "torch.nn.parameter"),
    *("torch.distributed.tensor", "torch.distributed._functional_collectives"),
)
