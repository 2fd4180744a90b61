"""Uses of the ops of ``torch.ops.lightning_fp8`` that are checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics.formats import float8_of
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops.activation import activation_backward_quantize_op, activation_quantize_op
from lightning_fp8.ops.cast import observe_op, quantize_columns_op, quantize_op, reference_quantize
from lightning_fp8.ops.gemm import Gemm, scaled_mm_accumulate_op, scaled_mm_op
from lightning_fp8.ops.gemm_cuda import aligned_operand
from lightning_fp8.ops.norm import Norm, norm_backward_op, norm_quantize_op
from lightning_fp8.ops.op import Op
from lightning_fp8.ops.scales import update_scales_op
from lightning_fp8.ops.transpose import transpose_op

SCALE = 100.0
"""The given scale, with which E4M3 saturates a few normal values."""

_EPS = 1e-5

HOST = {"host_microseconds": 8.0}
CAST, CAST_AND_MORE = {"fraction_of_copy": 0.90, **HOST}, {"fraction_of_copy": 0.85, **HOST}


Arguments = tuple[Any, ...]
Observed = tuple["Tensor | None", "Tensor | None"]
"""The last arguments of an op that casts: scale and amax."""


@dataclass(frozen=True)
class Operation:
    """One use of an op.

    Attributes:
        name: of the work.
        op: the op.
        dtype: of the codes, or of the input if there are none.
        arguments: from the tensor that the op reads, all arguments of the op.
        target: see :class:`benchmarks.measuring.record.Result`.
        exact: whether results must be bitwise equal to the reference's; otherwise nearly all values must be close.
        repeating: how many of the results repeat if the input's rows do; None for all.
    """

    name: str
    op: Op
    dtype: torch.dtype
    arguments: Callable[[Tensor], Arguments]
    target: dict[str, float] = field(default_factory=lambda: HOST)
    exact: bool = True
    repeating: int | None = None


class Call:
    """An operation with its arguments, to be called repeatedly as in training."""

    def __init__(self, operation: Operation, x: Tensor) -> None:
        op = operation.op
        self.function = op.call
        self.args = operation.arguments(x)
        self._written: list[Tensor] = [self.args[index] for index in op.writes if self.args[index] is not None]
        self._initially = [tensor.clone() for tensor in self._written]

    def __call__(self) -> Any:
        return self.function(*self.args)

    def restore(self) -> None:
        """Reset written arguments to their initial values, because an op may do less after it has been called."""
        for tensor, initially in zip(self._written, self._initially):
            tensor.copy_(initially)

    def outcome(self) -> list[Tensor]:
        """The results of a call, and the arguments that it wrote."""
        self.restore()
        results = self()
        given = () if results is None else (results,) if isinstance(results, Tensor) else results
        return [*given, *self._written]

    def bytes(self) -> int:
        return bytes_moved((arg for arg in self.args if isinstance(arg, Tensor)), self.outcome())


def bytes_moved(read: Iterable[Tensor], written: Iterable[Tensor]) -> int:
    """A lower bound of the memory traffic: each tensor is read once and written once.

    Padding between rows is not counted. A tensor that is updated in place is counted twice. Scaling by the tensor's own
    amax must read it twice, but counts one read: by this measure it cannot reach a copy's bandwidth.
    """
    return sum(tensor.numel() * tensor.element_size() for tensors in (read, written) for tensor in tensors)


def codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous codes of ``x [R, K]``, by torch alone."""
    largest = float8_of(dtype).max
    return (x.float() * SCALE).clamp(-largest, largest).to(dtype)


def casts(dtype: torch.dtype) -> list[Operation]:
    """Every way to cast ``x [R, K]`` to ``dtype``, and the transpose of its codes."""

    float8 = float8_of(dtype)

    def given(amax: bool, rowwise: bool, columnwise: bool, nonzero: bool = True) -> Callable[[Tensor], Arguments]:
        cast = Cast(float8, Layout.TENSOR).usage(rowwise, columnwise, nonzero)
        return lambda x: (x, cast, *_given(x, amax))

    def own(layout: Layout, columnwise: bool) -> Callable[[Tensor], Arguments]:
        power_2 = not layout.has_one_scale  # as the recipes do
        cast = Cast(float8, layout, power_2).usage(True, columnwise)
        return lambda x: (x, cast, None, None)

    def by_columns(x: Tensor) -> Arguments:
        return x, torch.linspace(SCALE / 2, 2 * SCALE, x.shape[1]).to(x.device), dtype

    operations = [
        Operation("cast", quantize_op, dtype, given(False, True, False), CAST),
        Operation("cast, scale may be 0", quantize_op, dtype, given(False, True, False, nonzero=False)),
        Operation("cast + amax", quantize_op, dtype, given(True, True, False), CAST),
        Operation("cast + transposed", quantize_op, dtype, given(False, True, True), CAST_AND_MORE),
        Operation("cast + transposed + amax", quantize_op, dtype, given(True, True, True), CAST_AND_MORE),
        Operation("transposed only", quantize_op, dtype, given(False, False, True)),
        Operation("cast by columns' scales", quantize_columns_op, dtype, by_columns, CAST),
        Operation("transpose of codes", transpose_op, dtype, lambda x: (codes(x, dtype),), CAST_AND_MORE),
    ]
    for layout in Layout:
        name = "current scaling" if layout.has_one_scale else layout.value
        target = CAST_AND_MORE if layout in (Layout.BLOCK_1X128, Layout.MX_1X32) else HOST
        operations += [
            Operation(name, quantize_op, dtype, own(layout, False), target),
            Operation(f"{name} + transposed", quantize_op, dtype, own(layout, True), target),
        ]
    return operations


OBSERVE = Operation("observe", observe_op, torch.bfloat16, lambda x: (x, torch.zeros((), device=x.device)))


def fused(dtype: torch.dtype) -> list[Operation]:
    """Normalizations, activations and their gradients; casts have a given scale."""

    def cast(x: Tensor, columnwise: bool) -> Arguments:
        return Cast(float8_of(dtype), Layout.TENSOR).usage(True, columnwise, True), *_given(x)

    def weight(x: Tensor) -> Tensor:
        return torch.linspace(0.5, 1.5, x.shape[1], device=x.device).bfloat16()

    def norm(rms: bool, columnwise: bool) -> Callable[[Tensor], Arguments]:
        bias = (lambda x: None) if rms else weight
        return lambda x: (x, weight(x), bias(x), Norm(_EPS, rms), *cast(x, columnwise))

    def norm_backward(dy: Tensor) -> Arguments:
        x = dy.flip(1)
        rstd = (x.float().square().mean(1) + _EPS).rsqrt()
        return dy, x, weight(x), rstd[None], Norm(0.0, rms=True), False

    def swiglu(columnwise: bool) -> Callable[[Tensor], Arguments]:
        return lambda x: (x, "swiglu", *cast(x, columnwise))

    def swiglu_backward(x: Tensor) -> Arguments:
        dy = x[:, : x.shape[1] // 2].contiguous()
        return dy, x, "swiglu", None, *cast(x, True)

    def operation(name: str, op: Op, arguments: Any, target: dict[str, float] = HOST, **fields: Any) -> Operation:
        return Operation(name, op, dtype, arguments, target, exact=False, **fields)

    return [
        operation("RMSNorm + cast", norm_quantize_op, norm(True, False), CAST_AND_MORE),
        operation("RMSNorm + cast + transposed", norm_quantize_op, norm(True, True)),
        operation("LayerNorm + cast", norm_quantize_op, norm(False, False)),
        operation("LayerNorm + cast + transposed", norm_quantize_op, norm(False, True)),
        operation("RMSNorm backward", norm_backward_op, norm_backward, repeating=1),  # weight's gradient sums all rows
        operation("SwiGLU + cast", activation_quantize_op, swiglu(False)),
        operation("SwiGLU + cast + transposed", activation_quantize_op, swiglu(True)),
        operation("SwiGLU backward + cast + transposed", activation_backward_quantize_op, swiglu_backward),
    ]


def products(dtype: torch.dtype) -> list[Operation]:
    """Products of ``x`` with itself, to measure host time; suite ``products`` measures the device's."""

    def operand(x: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        data, scale_inv, *_ = reference_quantize(x, Cast(float8_of(dtype), layout), None, None)
        return 2 * aligned_operand(data, scale_inv, layout)

    def product(layout: Layout) -> Callable[[Tensor], Arguments]:
        return lambda x: (*operand(x, layout), Gemm(layout, layout, torch.bfloat16, fast_accum=True), None)

    def accumulated(x: Tensor) -> Arguments:
        gemm = Gemm(Layout.TENSOR, Layout.TENSOR, torch.float32)
        return torch.zeros(len(x), len(x)), *operand(x, Layout.TENSOR), gemm

    return [
        Operation("product", scaled_mm_op, dtype, product(Layout.TENSOR), {}),
        Operation("product, 1x128", scaled_mm_op, dtype, product(Layout.BLOCK_1X128), {}),
        Operation("product, accumulated", scaled_mm_accumulate_op, dtype, accumulated, {}),
    ]


def _given(x: Tensor, amax: bool = True) -> Observed:
    """A given scale, and the amax so far if it is observed."""
    return torch.full((), SCALE, device=x.device), torch.zeros((), device=x.device) if amax else None


def update_scales(target: dict[str, float]) -> Operation:
    """The update of delayed scaling; reads the history ``[length, tensors]``."""

    def arguments(amax_history: Tensor) -> Arguments:
        amax_history = amax_history.abs()
        amax, amax_history[0] = amax_history[0].clone(), 0
        return amax, amax_history, torch.ones_like(amax), torch.full_like(amax, 448.0), 0.0, "max"

    return Operation("update_scales", update_scales_op, torch.float32, arguments, {**target, **HOST})
