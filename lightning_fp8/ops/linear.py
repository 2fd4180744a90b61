"""A linear layer's forward or backward pass: its casts, then its GEMMs.

The first call with tensors of new keys calls the ops, which check their arguments, and keeps the functions that these
ran, the *steps*. Later calls with tensors of the same keys run the steps alone, unless torch's dispatcher would do more
with an op than select its implementation (:func:`lightning_fp8.ops.op.is_watched`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import Outputs, quantize_op, transposed_operand
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.ops.memory import ALIGNMENT, operand_key, tensor_key
from lightning_fp8.ops.op import PLAIN_TENSORS, Op, increment_version, is_watched
from lightning_fp8.ops.plans import Run, current_device

Steps = tuple["Run | None", ...]
"""The functions that a pass calls in turn; None for what it does not compute."""
Key = tuple[Any, ...]

MAX_KEYS = 256
"""The number of keys whose steps a pass of one layer keeps."""


class _Pass:
    """The steps of a pass of one layer, by the keys of its tensors."""

    __slots__ = ("_last", "_steps")

    def __init__(self) -> None:
        self._steps: dict[Key, Steps] = {}
        self._last: tuple[Key | None, Steps | None] = None, None  # one tuple, since other threads may replace it

    def steps_of(self, key: Key | None) -> Steps | None:
        """The steps of an earlier call with this key, or None."""
        if key is None:
            return None
        last_key, steps = self._last
        if key != last_key:
            steps = self._steps.get(key)
            self._last = key, steps
        return steps

    def keep(self, key: Key, steps: Steps) -> None:
        """Keep the ``steps`` of calls with this key, and drop those that were planned before plans were cleared."""
        if len(self._steps) == MAX_KEYS or next(iter(self._steps), key)[0] != key[0]:
            self._steps = {}
        self._steps[key] = steps
        self._last = key, steps


class ForwardPass(_Pass):
    """``x wᵀ + bias [R, N]`` of ``x [R, K]`` and ``w [N, K]``.

    Attributes:
        x_cast, w_cast: the casts of x and w; None for one whose operand is given.
        gemm: the GEMM.
    """

    __slots__ = ("gemm", "w_cast", "x_cast")

    def __init__(self, x_cast: Cast | None, w_cast: Cast | None, gemm: Gemm) -> None:
        super().__init__()
        self.x_cast, self.w_cast, self.gemm = x_cast, w_cast, gemm

    def run(
        self,
        x: Tensor, x_scale: Tensor | None, x_amax: Tensor | None,
        w: Tensor, w_scale: Tensor | None, w_amax: Tensor | None, bias: Tensor | None,
    ) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor]]:  # fmt: skip
        """``x wᵀ + bias``, and the results of the casts of x and w.

        Args:
            x, x_scale, x_amax: a tensor, and the scale and amax of its cast; or the codes and scales of an operand.
            w, w_scale, w_amax: likewise.
        """
        key = _key(x_amax is None, w_amax is None, x, x_scale, w, w_scale, bias)
        steps = self.steps_of(key)
        quantize_x, quantize_w, multiply = steps or _FORWARD_OPS
        x8: Any = x, x_scale
        if self.x_cast is not None:
            x8 = quantize_x(x, self.x_cast, x_scale, x_amax, None)  # type: ignore[misc]
        w8: Any = w, w_scale
        if self.w_cast is not None:
            w8 = quantize_w(w, self.w_cast, w_scale, w_amax, None)  # type: ignore[misc]
        y = multiply(x8[0], x8[1], w8[0], w8[1], self.gemm, bias, None, None)  # type: ignore[misc]
        if steps is not None:
            if x_amax is not None:
                increment_version((x_amax,))
            if w_amax is not None:
                increment_version((w_amax,))
        elif key is not None:
            of_x = self.x_cast and _cast_step(x, self.x_cast, x_scale, x_amax)
            of_w = self.w_cast and _cast_step(w, self.w_cast, w_scale, w_amax)
            self.keep(key, (of_x, of_w, _gemm_step(x8[0], x8[1], w8[0], w8[1], self.gemm, bias)))
        return y, x8, w8


class BackwardPass(_Pass):
    """``dx = dy w [R, K]`` and ``dw = dyᵀ x [N, K]`` of ``dy [R, N]``.

    Attributes:
        dy_cast: the cast of dy; None if its operands are given.
        w_cast: the cast of w; None if the operand of wᵀ is given, or there is no dx.
        dx_gemm, dw_gemm: the GEMMs; None for a gradient that is not computed.
    """

    __slots__ = ("dw_gemm", "dx_gemm", "dy_cast", "w_cast")

    def __init__(self, dy_cast: Cast | None, w_cast: Cast | None, dx_gemm: Gemm | None, dw_gemm: Gemm | None) -> None:
        super().__init__()
        self.dy_cast, self.w_cast, self.dx_gemm, self.dw_gemm = dy_cast, w_cast, dx_gemm, dw_gemm

    def run(
        self,
        dy: Tensor | None, dy_scale: Tensor | None, dy_amax: Tensor | None,
        dy_t: Tensor | None, dy_t_scale: Tensor | None,
        w: Tensor | None, w_scale: Tensor | None, x_t: Tensor | None, x_t_scale: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Outputs | None]:  # fmt: skip
        """dx, dw, and the results of the cast of dy.

        Args:
            dy, dy_scale, dy_amax: a tensor, and the scale and amax of its cast; or the codes and scales of an operand.
            dy_t, dy_t_scale: the operand of dyᵀ, if dy is not cast.
            w, w_scale: a tensor, and the scale of its cast; or the operand of wᵀ.
            x_t, x_t_scale: the operand of xᵀ.
        """
        key = _key(dy_amax is None, False, dy, dy_scale, dy_t, dy_t_scale, w, w_scale, x_t, x_t_scale)
        steps = self.steps_of(key)
        quantize_dy, quantize_w, multiply_dx, multiply_dw = steps or _BACKWARD_OPS
        given: Any = dy, dy_scale, w, w_scale
        dy8: Any = None
        dx = dw = None
        if self.dy_cast is not None:
            dy8 = quantize_dy(dy, self.dy_cast, dy_scale, dy_amax, None)  # type: ignore[misc]
            dy, dy_scale = dy8[0], dy8[1]
            if self.dw_gemm is not None:
                dy_t, dy_t_scale = transposed_operand(dy8, self.dy_cast)
        if self.dx_gemm is not None:
            if self.w_cast is not None:
                w8 = quantize_w(w, self.w_cast, w_scale, None, None)  # type: ignore[misc]
                w, w_scale = transposed_operand(w8, self.w_cast)
            dx = multiply_dx(dy, dy_scale, w, w_scale, self.dx_gemm, None, None, None)  # type: ignore[misc]
        if self.dw_gemm is not None:
            dw = multiply_dw(dy_t, dy_t_scale, x_t, x_t_scale, self.dw_gemm, None, None, None)  # type: ignore[misc]
        if steps is not None:
            if dy_amax is not None:
                increment_version((dy_amax,))
        elif key is not None:
            self.keep(key, (
                self.dy_cast and _cast_step(given[0], self.dy_cast, given[1], dy_amax),
                self.w_cast and _cast_step(given[2], self.w_cast, given[3], None),
                self.dx_gemm and _gemm_step(dy, dy_scale, w, w_scale, self.dx_gemm, None),
                self.dw_gemm and _gemm_step(dy_t, dy_t_scale, x_t, x_t_scale, self.dw_gemm, None),
            ))  # fmt: skip
        return dx, dw, dy8


def _key(first_unobserved: bool, second_unobserved: bool, *tensors: Tensor | None) -> Key | None:
    """All that the steps depend on; None if the dispatcher must see the ops, or a tensor is of a subclass.

    The steps are for amaxes that are present or not, and hold for the current GPU until plans are cleared.
    """
    if is_watched():
        return None
    key: list[Any] = [plans.generation, first_unobserved, second_unobserved]
    on_gpu = False
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) in PLAIN_TENSORS and not (x.is_neg() or x.is_meta):
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT, x.device)
            on_gpu = x.is_cuda
        else:
            return None
    key.append(on_gpu and current_device())
    return tuple(key)


# --- Steps ------------------------------------------------------------------------------------------------------------


def _multiply_by_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None, *_: None
) -> Tensor:
    return scaled_mm_op.call(a, scale_a, b, scale_b, gemm, bias)  # type: ignore[no-any-return]


_FORWARD_OPS: Steps = quantize_op.call, quantize_op.call, _multiply_by_op
_BACKWARD_OPS: Steps = quantize_op.call, quantize_op.call, _multiply_by_op, _multiply_by_op


def _cast_step(x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Run:
    return _step(quantize_op, x, tensor_key(x), (*cast.key, scale is not None, amax is not None, False))


def _gemm_step(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None) -> Run:
    if bias is not None and not bias.is_contiguous():
        return scaled_mm_op.implementations[a.device.type]
    of_bias = None if bias is None else tensor_key(bias)
    return _step(scaled_mm_op, a, operand_key(a, scale_a), operand_key(b, scale_b), gemm.flat, of_bias, None, False)


def _step(op: Op, x: Tensor, *key: Any) -> Run:
    """The function that ``op`` runs for tensors of a ``key`` on the device of ``x``, which has run it before."""
    device = x.device
    plan = op.plans.get(device.type)
    if plan is None:
        return op.implementations[device.type]
    return plan(device, x.is_cuda and current_device(), *key)  # type: ignore[no-any-return]
