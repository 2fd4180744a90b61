"""The casts and GEMMs of a linear layer's forward or backward pass in one call, if no dispatch mode observes the ops.

The implementations, the plans and all bits of the results are those of ``quantize`` and ``scaled_mm``. Arguments and
dispatch modes are checked only once for each pass. A pass has one plan with one key, which also determines the operands
between casts and GEMMs. A layer keeps the plan of its last call (:class:`KeptPlan`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import Outputs, kernel_allocations, quantize_op, transposed_operand
from lightning_fp8.ops.checks import HIGH_PRECISION
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.ops.memory import KeyAndDevice, OperandKey, PlainKey, key_and_device, tensor_key
from lightning_fp8.ops.op import Op, are_plain, increment_version, is_watched
from lightning_fp8.ops.plans import Run, cached, current_device

CastKey = tuple[Any, ...]
"""A cast's :attr:`~lightning_fp8.numerics.scaled.Cast.key`."""

_HIGH_PRECISION = frozenset(HIGH_PRECISION)


class KeptPlan:
    """A pass of one layer, with the casts and GEMMs that it always has, and the plan of its last call.

    As long as its tensors have the same keys, a layer does not look its plan up.

    Attributes:
        cast: the cast of the first tensor; None if the pass takes an operand.
    """

    __slots__ = ("_fixed", "_last", "_plan", "cast")

    def __init__(self, plan: Callable[..., Run | None], cast: Cast | None, *fixed: Any) -> None:
        self._plan = plan
        self._fixed = cast, *fixed
        self.cast = cast
        self._last: tuple[Any, Run | None] = None, None  # one tuple, since other threads may replace it

    def run(self, *key: Any) -> Run | None:
        last_key, run = self._last
        current = plans.generation, key
        if current != last_key:
            run = self._plan(*key, *self._fixed)
            self._last = current, run
        return run


def forward_pass(x_cast: Cast | None, w_cast: Cast, gemm: Gemm) -> KeptPlan:
    """For :func:`linear_forward`. Without ``x_cast`` it takes an operand of x instead of x."""
    return KeptPlan(_forward_plan, x_cast, w_cast, gemm)


def backward_pass(dy_cast: Cast | None, w_cast: Cast, dx_gemm: Gemm, dw_gemm: Gemm) -> KeptPlan:
    """For :func:`linear_backward`. Without ``dy_cast`` it takes both operands of dy instead of dy."""
    return KeptPlan(_backward_plan, dy_cast, w_cast, dx_gemm, dw_gemm)


def linear_forward(
    kept: KeptPlan,
    x: Tensor, x_scale: Tensor | None, x_amax: Tensor | None,
    weight: Tensor, w_scale: Tensor | None, w_amax: Tensor | None, bias: Tensor | None,
) -> tuple[Tensor, Outputs | None] | None:  # fmt: skip
    """``x wᵀ + bias [R, N]`` of ``x [R, K]``, and the results of x's cast.

    It returns None if a dispatch mode observes the ops, or if an op would copy or reject an argument. The caller then
    calls the ops one by one.

    Args:
        x, x_scale, x_amax: a tensor, and the scale and amax of its cast; or the codes and scales of an operand, and
            None.
    """
    if is_watched() or not are_plain(x, x_scale, weight, bias):
        return None
    run = kept.run(
        x.device, x.is_cuda and current_device(), tensor_key(x), _key_of_scale(kept, x_scale),
        x_amax is not None, key_and_device(weight), None if w_scale is None else w_scale.device, w_amax is not None,
        None if bias is None else key_and_device(bias),
    )  # fmt: skip
    if run is None:
        return None
    results: tuple[Tensor, Outputs | None] = run(x, x_scale, x_amax, weight, w_scale, w_amax, bias)
    if w_amax is not None:
        increment_version((w_amax,) if x_amax is None else (x_amax, w_amax))
    return results


def linear_backward(
    kept: KeptPlan,
    dy: Tensor, dy_scale: Tensor | None, dy_amax: Tensor | None, transposed: tuple[Tensor, Tensor] | None,
    weight: Tensor, w_scale: Tensor | None, x_t: Tensor, x_t_scale_inv: Tensor,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """``dy w [R, K]`` and ``dyᵀ x [N, K]``, given ``dy [R, N]`` and the operand of xᵀ; None as in linear_forward.

    Args:
        dy, dy_scale, dy_amax: as ``x`` in linear_forward.
        transposed: the operand of dyᵀ, if that of dy is given.
    """
    if is_watched() or not are_plain(dy, dy_scale, weight, x_t, x_t_scale_inv, *transposed or ()):
        return None
    run = kept.run(
        dy.device, dy.is_cuda and current_device(), tensor_key(dy),
        _key_of_scale(kept, dy_scale), dy_amax is not None,
        None if transposed is None else (key_and_device(transposed[0]), key_and_device(transposed[1])),
        key_and_device(weight), None if w_scale is None else w_scale.device,
        key_and_device(x_t), key_and_device(x_t_scale_inv),
    )  # fmt: skip
    if run is None:
        return None
    results: tuple[Tensor, Tensor] = run(dy, dy_scale, dy_amax, transposed, weight, w_scale, x_t, x_t_scale_inv)
    if dy_amax is not None:
        increment_version((dy_amax,))
    return results


def _key_of_scale(kept: KeptPlan, scale: Tensor | None) -> Any:
    """All that a plan depends on: the device of the scale of a cast, but the key of an operand's scales."""
    return None if scale is None else scale.device if kept.cast else key_and_device(scale)


def forget_plans() -> None:
    """Clear the plans of passes, after an implementation of an op was changed."""
    _forward_plan.cache_clear()
    _backward_plan.cache_clear()
    plans.outdate()


# --- Plans ------------------------------------------------------------------------------------------------------------


@cached
def _forward_plan(
    device: torch.device,
    current: int | bool,
    x_key: PlainKey,
    x_scale_key: Any,
    x_has_amax: bool,
    w_key: KeyAndDevice,
    w_scale_device: torch.device | None,
    w_has_amax: bool,
    bias_key: KeyAndDevice | None,
    x_cast: Cast | None,
    w_cast: Cast,
    gemm: Gemm,
) -> Run | None:
    is_biased = bias_key is None or (
        bias_key[0] in _HIGH_PRECISION and bias_key[1] == w_key[1][:1] and bias_key[2] == (1,) and bias_key[4] == device
    )
    if not (_fits(device, x_key, x_scale_key, x_cast, gemm.layout_a, w_key, 1, w_scale_device) and is_biased):
        return None
    if x_cast is not None and x_has_amax != w_has_amax:
        return None
    on_device = device, current
    quantize_w = _cast_plan(*on_device, w_key[:4], w_cast.key, w_scale_device is not None, w_has_amax)
    of_w, of_bias = _key_of_x(w_cast.key, w_key[:4]), None if bias_key is None else bias_key[:4]
    if x_cast is None:
        multiply = _gemm_plan(*on_device, _given_key(x_key, x_scale_key), of_w, gemm, of_bias)

        def run_given(
            x: Tensor, x_scale_inv: Tensor, _: None, weight: Tensor, w_scale: Any, w_amax: Any, bias: Any
        ) -> tuple[Tensor, None]:
            w8 = quantize_w(weight, w_cast, w_scale, w_amax)
            return multiply(x, x_scale_inv, w8[0], w8[1], gemm, bias, None, None), None

        return run_given
    quantize_x = _cast_plan(*on_device, x_key, x_cast.key, x_scale_key is not None, x_has_amax)
    multiply = _gemm_plan(*on_device, _key_of_x(x_cast.key, x_key), of_w, gemm, of_bias)

    def run(
        x: Tensor, x_scale: Any, x_amax: Any, weight: Tensor, w_scale: Any, w_amax: Any, bias: Any
    ) -> tuple[Tensor, Outputs]:
        x8 = quantize_x(x, x_cast, x_scale, x_amax)
        w8 = quantize_w(weight, w_cast, w_scale, w_amax)
        return multiply(x8[0], x8[1], w8[0], w8[1], gemm, bias, None, None), x8

    return run


@cached
def _backward_plan(
    device: torch.device,
    current: int | bool,
    dy_key: PlainKey,
    dy_scale_key: Any,
    has_amax: bool,
    dy_t_keys: tuple[KeyAndDevice, KeyAndDevice] | None,
    w_key: KeyAndDevice,
    w_scale_device: torch.device | None,
    x_t_key: KeyAndDevice,
    x_t_scale_key: KeyAndDevice,
    dy_cast: Cast | None,
    w_cast: Cast,
    dx_gemm: Gemm,
    dw_gemm: Gemm,
) -> Run | None:
    operands = (
        (x_t_key, x_t_scale_key, dw_gemm.layout_b),
        *(() if dy_t_keys is None else ((*dy_t_keys, dw_gemm.layout_a),)),
    )
    if not (
        _fits(device, dy_key, dy_scale_key, dy_cast, dx_gemm.layout_a, w_key, 0, w_scale_device)
        and all(_is_operand(device, *each) for each in operands)
        and dy_key[1][0] == x_t_key[1][1]
        and (dy_t_keys is None or dy_t_keys[0][1] == dy_key[1][::-1])
    ):
        return None
    on_device = device, current
    quantize_w = _cast_plan(*on_device, w_key[:4], w_cast.key, w_scale_device is not None, False)
    if dy_cast is None:
        assert dy_t_keys is not None
        of_dy, of_dy_t = _given_key(dy_key, dy_scale_key), _given_key(dy_t_keys[0][:4], dy_t_keys[1])
    else:
        quantize_dy = _cast_plan(*on_device, dy_key, dy_cast.key, dy_scale_key is not None, has_amax)
        of_dy, of_dy_t = _key_of_x(dy_cast.key, dy_key), _key_of_transposed(dy_cast.key, dy_key)
    multiply_dx = _gemm_plan(*on_device, of_dy, _key_of_transposed(w_cast.key, w_key[:4]), dx_gemm, None)
    multiply_dw = _gemm_plan(*on_device, of_dy_t, _given_key(x_t_key[:4], x_t_scale_key), dw_gemm, None)

    def run(
        dy: Tensor, dy_scale: Any, dy_amax: Any, transposed: Any, weight: Tensor, w_scale: Any,
        x_t: Tensor, x_t_scale_inv: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if dy_cast is not None:
            dy8 = quantize_dy(dy, dy_cast, dy_scale, dy_amax)
            dy, dy_scale, transposed = dy8[0], dy8[1], transposed_operand(dy8, dy_cast)
        w8 = quantize_w(weight, w_cast, w_scale, None)
        dx = multiply_dx(dy, dy_scale, *transposed_operand(w8, w_cast), dx_gemm, None, None, None)
        dw = multiply_dw(*transposed, x_t, x_t_scale_inv, dw_gemm, None, None, None)
        return dx, dw

    return run


def _is_operand(device: torch.device, key: KeyAndDevice, scale_key: KeyAndDevice, layout: Layout) -> bool:
    """Whether tensors of these keys are an operand on the device, with the scales of ``layout``."""
    of_scales = layout.scale_dtype, layout.scale_shape(*key[1])
    return key[4] == scale_key[4] == device and scale_key[:2] == of_scales


def _fits(
    device: torch.device,
    key: PlainKey,
    scale_key: Any,
    cast: Cast | None,
    layout: Layout,
    w_key: KeyAndDevice,
    contraction: int,
    w_scale_device: torch.device | None,
) -> bool:
    """Whether the ops accept a tensor or operand and a weight whose dimension ``contraction`` is the tensor's last."""
    shape, (w_dtype, w_shape, w_strides, _, w_device) = key[1], w_key
    return (
        device.type in quantize_op.implementations
        and w_dtype in _HIGH_PRECISION
        and len(shape) == len(w_shape) == 2
        and shape[1] == w_shape[contraction]
        and w_strides == (w_shape[1], 1)
        and 0 not in (*shape, *w_shape)
        and w_device == device
        and w_scale_device in (None, device)
        and (_is_operand(device, (*key, device), scale_key, layout) if cast is None else key[0] in _HIGH_PRECISION)
        and (cast is None or scale_key == w_scale_device)
    )


def _cast_plan(
    device: torch.device, current: int | bool, key: PlainKey, cast: CastKey, has_scale: bool, has_amax: bool
) -> Run:
    plan = quantize_op.plans.get(device.type)
    if plan is None:
        return _implementation(quantize_op, device)
    return plan(device, current, key, (*cast, has_scale, has_amax))  # type: ignore[no-any-return]


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


def _given_key(key: PlainKey, scale_key: Any) -> OperandKey:
    """The ``operand_key`` of an operand."""
    return *key, *scale_key[2:4]


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
