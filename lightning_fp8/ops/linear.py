"""The casts and GEMMs of a linear layer's forward or backward pass in one call, if no dispatch mode observes the ops.

The implementations, the plans and all bits of the results are those of ``quantize`` and ``scaled_mm``. Arguments and
dispatch modes are checked only once for each pass. A pass has one plan with one key, which also determines the operands
between casts and GEMMs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fp8.ops.cast import Outputs, kernel_allocations, quantize_op, transposed_operand
from lightning_fp8.ops.checks import HIGH_PRECISION
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.ops.memory import KeyAndDevice, OperandKey, PlainKey, key_and_device, tensor_key
from lightning_fp8.ops.op import Op, are_plain, increment_version, is_watched
from lightning_fp8.ops.plans import Run, cached, current_device
from lightning_fp8.scaled import Cast

CastKey = tuple[Any, ...]
"""A cast's :attr:`~lightning_fp8.scaled.Cast.key`."""

_HIGH_PRECISION = frozenset(HIGH_PRECISION)


def linear_forward(
    x: Tensor, x_cast: Cast, x_scale: Tensor | None, x_amax: Tensor | None,
    weight: Tensor, w_cast: Cast, w_scale: Tensor | None, w_amax: Tensor | None,
    gemm: Gemm, bias: Tensor | None,
) -> tuple[Tensor, Outputs] | None:  # fmt: skip
    """``x wᵀ + bias [R, N]`` of ``x [R, K]``, and the results of x's cast.

    It returns None if a dispatch mode observes the ops, or if an op would copy or reject an argument. The caller then
    calls the ops one by one.
    """
    if is_watched() or not are_plain(x, weight, bias):
        return None
    run = _forward_plan(
        x.device, x.is_cuda and current_device(), tensor_key(x), x_cast.key, x_amax is not None,
        key_and_device(weight), w_cast.key, w_amax is not None, None if x_scale is None else x_scale.device,
        gemm, None if bias is None else key_and_device(bias),
    )  # fmt: skip
    if run is None:
        return None
    results: tuple[Tensor, Outputs] = run(x, x_cast, x_scale, x_amax, weight, w_cast, w_scale, w_amax, gemm, bias)
    if x_amax is not None and w_amax is not None:
        increment_version((x_amax, w_amax))
    return results


def linear_backward(
    dy: Tensor, dy_cast: Cast, dy_scale: Tensor | None, dy_amax: Tensor | None,
    weight: Tensor, w_cast: Cast, w_scale: Tensor | None,
    x_t: Tensor, x_t_scale_inv: Tensor, dx_gemm: Gemm, dw_gemm: Gemm,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """``dy w [R, K]`` and ``dyᵀ x [N, K]``, given ``dy [R, N]`` and the operand of xᵀ; None as in linear_forward."""
    if is_watched() or not are_plain(dy, weight, x_t, x_t_scale_inv):
        return None
    run = _backward_plan(
        dy.device, dy.is_cuda and current_device(), tensor_key(dy), dy_cast.key, dy_amax is not None,
        key_and_device(weight), w_cast.key, None if dy_scale is None else dy_scale.device,
        key_and_device(x_t), key_and_device(x_t_scale_inv), dx_gemm, dw_gemm,
    )  # fmt: skip
    if run is None:
        return None
    results: tuple[Tensor, Tensor] = run(
        dy, dy_cast, dy_scale, dy_amax, weight, w_cast, w_scale, x_t, x_t_scale_inv, dx_gemm, dw_gemm
    )
    if dy_amax is not None:
        increment_version((dy_amax,))
    return results


def forget_plans() -> None:
    """Clear the plans of passes, after an implementation of an op was changed."""
    _forward_plan.cache_clear()
    _backward_plan.cache_clear()


# --- Plans ------------------------------------------------------------------------------------------------------------


@cached
def _forward_plan(
    device: torch.device,
    current: int | bool,
    x_key: PlainKey,
    x_cast: CastKey,
    x_has_amax: bool,
    w_key: KeyAndDevice,
    w_cast: CastKey,
    w_has_amax: bool,
    scale_device: torch.device | None,
    gemm: Gemm,
    bias_key: KeyAndDevice | None,
) -> Run | None:
    has_scale = scale_device is not None
    biases = () if bias_key is None else (bias_key,)
    is_biased = all(
        each[0] in _HIGH_PRECISION and each[1] == w_key[1][:1] and each[2] == (1,) and each[4] == device
        for each in biases
    )
    if not (_fits(device, x_key, w_key, 1, scale_device) and is_biased and x_has_amax == w_has_amax):
        return None
    on_device = device, current
    quantize_x = _cast_plan(*on_device, x_key, x_cast, has_scale, x_has_amax)
    quantize_w = _cast_plan(*on_device, w_key[:4], w_cast, has_scale, w_has_amax)
    operands = _key_of_x(x_cast, x_key), _key_of_x(w_cast, w_key[:4])
    multiply = _gemm_plan(*on_device, *operands, gemm, None if bias_key is None else bias_key[:4])

    def run(
        x: Tensor, x_cast: Cast, x_scale: Any, x_amax: Any,
        weight: Tensor, w_cast: Cast, w_scale: Any, w_amax: Any, gemm: Gemm, bias: Any,
    ) -> tuple[Tensor, Outputs]:  # fmt: skip
        x8 = quantize_x(x, x_cast, x_scale, x_amax, None)
        w8 = quantize_w(weight, w_cast, w_scale, w_amax, None)
        return multiply(x8[0], x8[1], w8[0], w8[1], gemm, bias, None, None), x8

    return run


@cached
def _backward_plan(
    device: torch.device,
    current: int | bool,
    dy_key: PlainKey,
    dy_cast: CastKey,
    has_amax: bool,
    w_key: KeyAndDevice,
    w_cast: CastKey,
    scale_device: torch.device | None,
    x_t_key: KeyAndDevice,
    x_t_scale_key: KeyAndDevice,
    dx_gemm: Gemm,
    dw_gemm: Gemm,
) -> Run | None:
    layout = dw_gemm.layout_b
    kept = x_t_scale_key[:2], x_t_key[4], x_t_scale_key[4]
    as_cast = (layout.scale_dtype, layout.scale_shape(*x_t_key[1])), device, device
    if not (_fits(device, dy_key, w_key, 0, scale_device) and kept == as_cast and dy_key[1][0] == x_t_key[1][1]):
        return None
    on_device, has_scale = (device, current), scale_device is not None
    quantize_dy = _cast_plan(*on_device, dy_key, dy_cast, has_scale, has_amax)
    quantize_w = _cast_plan(*on_device, w_key[:4], w_cast, has_scale, False)
    of_dx = _key_of_x(dy_cast, dy_key), _key_of_transposed(w_cast, w_key[:4])
    multiply_dx = _gemm_plan(*on_device, *of_dx, dx_gemm, None)
    multiply_dw = _gemm_plan(
        *on_device, _key_of_transposed(dy_cast, dy_key), (*x_t_key[:4], *x_t_scale_key[2:4]), dw_gemm, None
    )

    def run(
        dy: Tensor, dy_cast: Cast, dy_scale: Any, dy_amax: Any, weight: Tensor, w_cast: Cast, w_scale: Any,
        x_t: Tensor, x_t_scale_inv: Tensor, dx_gemm: Gemm, dw_gemm: Gemm,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dy8 = quantize_dy(dy, dy_cast, dy_scale, dy_amax, None)
        w8 = quantize_w(weight, w_cast, w_scale, None, None)
        dx = multiply_dx(dy8[0], dy8[1], *transposed_operand(w8, w_cast), dx_gemm, None, None, None)
        dw = multiply_dw(*transposed_operand(dy8, dy_cast), x_t, x_t_scale_inv, dw_gemm, None, None, None)
        return dx, dw

    return run


def _fits(
    device: torch.device, key: PlainKey, w_key: KeyAndDevice, contraction: int, scale_device: torch.device | None
) -> bool:
    """Whether the ops accept a tensor of ``key`` and a weight whose dimension ``contraction`` is the tensor's last."""
    (dtype, shape, _, _), (w_dtype, w_shape, w_strides, _, w_device) = key, w_key
    return (
        device.type in quantize_op.implementations
        and {dtype, w_dtype} <= _HIGH_PRECISION
        and len(shape) == len(w_shape) == 2
        and shape[1] == w_shape[contraction]
        and w_strides == (w_shape[1], 1)
        and 0 not in (*shape, *w_shape)
        and w_device == device
        and scale_device in (None, device)
    )


def _cast_plan(
    device: torch.device, current: int | bool, key: PlainKey, cast: CastKey, has_scale: bool, has_amax: bool
) -> Run:
    plan = quantize_op.plans.get(device.type)
    if plan is None:
        return _implementation(quantize_op, device)
    return plan(device, current, key, (*cast, has_scale, has_amax, False))  # type: ignore[no-any-return]


def _gemm_plan(
    device: torch.device, current: int | bool, a_key: Any, b_key: Any, gemm: Gemm, bias_key: PlainKey | None
) -> Run:
    plan = scaled_mm_op.plans.get(device.type)
    if plan is None:
        return _implementation(scaled_mm_op, device)
    return plan(device, current, a_key, b_key, gemm.flat, bias_key, None, False)  # type: ignore[no-any-return]


def _implementation(op: Op, device: torch.device) -> Run:
    """The implementation of an op without plans, which is looked up in every call."""
    implementations, device_type = op.implementations, device.type
    return lambda *args: implementations[device_type](*args)


def _key_of_x(cast: CastKey, key: PlainKey) -> OperandKey:
    """The ``operand_key`` of x after a cast of a tensor of ``key``. New memory is aligned."""
    rows, columns = key[1]
    data, scale_inv, *_ = kernel_allocations(Cast.from_flat(*cast), rows, columns)
    return data.dtype, (rows, columns), data.strides, 0, scale_inv.strides, 0


def _key_of_transposed(cast: CastKey, key: PlainKey) -> OperandKey:
    """The ``operand_key`` of xᵀ."""
    rows, columns = key[1]
    made = Cast.from_flat(*cast)
    _, scale_inv, data, scale_inv_t = kernel_allocations(made, rows, columns)
    strides = (scale_inv if made.layout.has_one_scale else scale_inv_t).strides
    return data.dtype, (columns, rows), data.strides, 0, strides, 0
