"""What the ops of ``torch.ops.lightning_fp8`` are asked to do: the work that is checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.formats import float8_of
from lightning_fp8.ops.core.registration import op
from lightning_fp8.ops.gemm.options import format_scaled_mm_options
from lightning_fp8.ops.gemm.problem import aligned_operand
from lightning_fp8.ops.norm.schema import format_norm_options
from lightning_fp8.ops.quantize import reference
from lightning_fp8.ops.quantize.options import format_quantize_options
from lightning_fp8.scaled import Cast, Layout

SCALE = 100.0
"""The given scale: of normal values, E4M3 saturates a few."""

_EPS = 1e-5

HOST = {"host_microseconds": 8.0}
CAST, CAST_AND_MORE = {"fraction_of_copy": 0.90, **HOST}, {"fraction_of_copy": 0.85, **HOST}


Arguments = dict[str, Any]


@dataclass(frozen=True)
class Operation:
    """One use of an op.

    Attributes:
        name: of the work.
        op: name in ``torch.ops.lightning_fp8``.
        dtype: of the codes, or of the input where there are none.
        arguments: the op's arguments by name, from the tensor that it reads; others take the schema's defaults.
        target: what it shall reach; see :class:`benchmarks.measuring.record.Result`.
        exact: whether its results are the reference's to the bit; otherwise nearly all of their values are.
        repeating: how many of the results repeat when the input's rows do; None for all.
    """

    name: str
    op: str
    dtype: torch.dtype
    arguments: Callable[[Tensor], Arguments]
    target: dict[str, float] = field(default_factory=lambda: HOST)
    exact: bool = True
    repeating: int | None = None


class Call:
    """An operation with its arguments, ready to be called again and again, as training calls it.

    Args:
        function: what computes ``operation.op`` of its arguments in the schema's order; None for the package's own.

    Raises:
        AttributeError: there is no such op.
    """

    def __init__(self, operation: Operation, x: Tensor, function: Callable[..., Any] | None = None) -> None:
        self.function = function or op(operation.op)
        named = operation.arguments(x)
        parameters = getattr(torch.ops.lightning_fp8, operation.op).default._schema.arguments
        self.args = [named.pop(each.name) if each.name in named else each.default_value for each in parameters]
        assert not named, f"{operation.op} has no {', '.join(named)}"
        self._written: list[Tensor] = [
            arg
            for arg, parameter in zip(self.args, parameters)
            if isinstance(arg, Tensor) and parameter.alias_info is not None and parameter.alias_info.is_write
        ]
        self._initially = [tensor.clone() for tensor in self._written]

    def __call__(self) -> Any:
        return self.function(*self.args)

    def restore(self) -> None:
        """Give written arguments their first values back: an op may do less where its last call left nothing to do."""
        for tensor, initially in zip(self._written, self._initially):
            tensor.copy_(initially)

    def outcome(self) -> list[Tensor]:
        """All that a call leaves: its results, and the arguments that it wrote."""
        self.restore()
        results = self()
        return [*(() if results is None else results), *self._written]

    def bytes(self) -> int:
        return bytes_moved((arg for arg in self.args if isinstance(arg, Tensor)), self.outcome())


def bytes_moved(read: Iterable[Tensor], written: Iterable[Tensor]) -> int:
    """The fewest bytes that can move through memory: each tensor that is read once, each that is written once.

    Elements count, not the padding between rows. A tensor that is updated in place is in both. Scaling from the
    tensor's own amax has to look at it twice and is counted once: it cannot reach a copy's bandwidth by this measure.
    """
    return sum(tensor.numel() * tensor.element_size() for tensors in (read, written) for tensor in tensors)


def casts(dtype: torch.dtype) -> list[Operation]:
    """Every way to cast ``x [R, K]`` to ``dtype``."""

    float8 = float8_of(dtype)

    def given(amax: bool, rowwise: bool, columnwise: bool, nonzero: bool = True) -> Callable[[Tensor], Arguments]:
        options_text = format_quantize_options(Cast(float8, Layout.TENSOR), rowwise, columnwise, nonzero)
        return lambda x: {"x": x, "options": options_text, **_scale(x, amax)}

    def own(layout: Layout, columnwise: bool) -> Callable[[Tensor], Arguments]:
        power_2 = not layout.has_one_scale  # as the recipes do
        return lambda x: {"x": x, "options": format_quantize_options(Cast(float8, layout, power_2), True, columnwise)}

    operations = [
        Operation("cast", "quantize_unobserved", dtype, given(False, True, False), CAST),
        Operation("cast, scale may be 0", "quantize_unobserved", dtype, given(False, True, False, nonzero=False)),
        Operation("cast + amax", "quantize", dtype, given(True, True, False), CAST),
        Operation("cast + transposed", "quantize_unobserved", dtype, given(False, True, True), CAST_AND_MORE),
        Operation("cast + transposed + amax", "quantize", dtype, given(True, True, True), CAST_AND_MORE),
        Operation("transposed only", "quantize_unobserved", dtype, given(False, False, True)),
    ]
    for layout in Layout:
        name = "current scaling" if layout.has_one_scale else layout.value
        target = CAST_AND_MORE if layout in (Layout.BLOCK_1X128, Layout.MX_1X32) else HOST
        operations += [
            Operation(name, "quantize_unobserved", dtype, own(layout, False), target),
            Operation(f"{name} + transposed", "quantize_unobserved", dtype, own(layout, True), target),
        ]
    return operations


OBSERVE = Operation("observe", "observe", torch.bfloat16, lambda x: {"x": x, "amax": _scale(x)["amax"]})


def fused(dtype: torch.dtype) -> list[Operation]:
    """Normalizations, activations and their gradients, cast with a given scale where they are cast."""

    def cast(x: Tensor, computed: str, columnwise: bool) -> Arguments:
        options_text = format_quantize_options(
            Cast(float8_of(dtype), Layout.TENSOR), True, columnwise, scale_is_nonzero=True
        )
        return {**_scale(x), "options": f"{computed}, {options_text}"}

    def weight(x: Tensor) -> Tensor:
        return torch.linspace(0.5, 1.5, x.shape[1], device=x.device).bfloat16()

    def norm(rms: bool, columnwise: bool) -> Callable[[Tensor], Arguments]:
        def arguments(x: Tensor) -> Arguments:
            parameters = {"weight": weight(x), "bias": None if rms else weight(x)}
            return {"x": x, **parameters, **cast(x, format_norm_options(rms, _EPS, False), columnwise)}

        return arguments

    def norm_backward(dy: Tensor) -> Arguments:
        x = dy.flip(1)
        rstd = (x.float().square().mean(1) + _EPS).rsqrt()
        return {"dy": dy, "x": x, "weight": weight(x), "statistics": rstd[None], "options": "rms"}

    def swiglu(columnwise: bool) -> Callable[[Tensor], Arguments]:
        return lambda x: {"x": x, **cast(x, "swiglu", columnwise)}

    def swiglu_backward(x: Tensor) -> Arguments:
        dy = x[:, : x.shape[1] // 2].contiguous()
        return {"dy": dy, "x": x, **cast(x, "swiglu", True)}

    def operation(name: str, op: str, arguments: Any, target: dict[str, float] = HOST, **fields: Any) -> Operation:
        return Operation(name, op, dtype, arguments, target, exact=False, **fields)

    return [
        operation("RMSNorm + cast", "norm_quantize", norm(True, False), CAST_AND_MORE),
        operation("RMSNorm + cast + transposed", "norm_quantize", norm(True, True)),
        operation("LayerNorm + cast", "norm_quantize", norm(False, False)),
        operation("LayerNorm + cast + transposed", "norm_quantize", norm(False, True)),
        operation("RMSNorm backward", "norm_backward", norm_backward, repeating=1),  # weight's gradient sums all rows
        operation("SwiGLU + cast", "activation_quantize", swiglu(False)),
        operation("SwiGLU + cast + transposed", "activation_quantize", swiglu(True)),
        operation("SwiGLU backward + cast + transposed", "activation_backward_quantize", swiglu_backward),
    ]


def products(dtype: torch.dtype) -> list[Operation]:
    """Products of ``x`` with itself, for the host's time; suite ``products`` has the card's."""

    def arguments(layout: Layout, accumulate: bool) -> Callable[[Tensor], Arguments]:
        def of(x: Tensor) -> Arguments:
            options_text = f"{float8_of(dtype).name.lower()} {layout.value} rowwise"
            data, scale_inv, *_ = reference.quantize(x, options_text)
            operand, scale = aligned_operand((data, scale_inv), layout)
            named = {"a": operand, "scale_a": scale, "b": operand, "scale_b": scale}
            if accumulate:
                return {
                    **named,
                    "out": torch.zeros(len(x), len(x)),
                    "options": format_scaled_mm_options(layout, layout, torch.float32),
                }
            return {**named, "options": format_scaled_mm_options(layout, layout, torch.bfloat16, fast_accum=True)}

        return of

    return [
        Operation("product", "scaled_mm", dtype, arguments(Layout.TENSOR, False), {}),
        Operation("product, 1x128", "scaled_mm", dtype, arguments(Layout.BLOCK_1X128, False), {}),
        Operation("product, accumulated", "scaled_mm_accumulate", dtype, arguments(Layout.TENSOR, True), {}),
    ]


def _scale(x: Tensor, amax: bool = True) -> Arguments:
    """A given scale, and the largest amax so far if it is observed."""
    given = {"scale": torch.full((), SCALE, device=x.device)}
    return {**given, "amax": torch.zeros((), device=x.device)} if amax else given


def update_scales(target: dict[str, float]) -> Operation:
    """The update of delayed scaling; reads the window ``[length, tensors]``."""

    def arguments(amax_history: Tensor) -> Arguments:
        amax_history = amax_history.abs()
        amax, amax_history[0] = amax_history[0].clone(), 0
        state = {"amax": amax, "amax_history": amax_history, "scale": torch.ones_like(amax)}
        rule = {"fp8_max": torch.full_like(amax, 448.0), "margin": 0.0, "algorithm": "max"}
        return {**state, **rule}

    return Operation("update_scales", "update_scales", torch.float32, arguments, {**target, **HOST})
