"""A linear layer's forward or backward pass: its casts, then its GEMMs.

The first call with tensors of new keys calls the ops, which check their arguments, and keeps the functions that these
ran, the *steps*. Later calls with tensors of the same keys run the steps alone, unless torch's dispatcher would do more
with an op than select its implementation (:func:`lightning_fp8.ops.op.is_watched`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import quantize_op, transposed_operand
from lightning_fp8.ops.gemm import Gemm, scaled_mm_op
from lightning_fp8.ops.memory import ALIGNMENT, operand_key, tensor_key
from lightning_fp8.ops.op import PLAIN_TENSORS, Op, increment_version, is_watched
from lightning_fp8.ops.plans import Run, current_device

Steps = tuple["Run | None", ...]
"""The functions that a pass calls in turn; None for what it does not compute."""
Key = list[Any]

MAX_KEYS = 256
"""The number of keys whose steps a pass keeps."""


class Pass:
    """The casts and GEMMs of one layer that a forward or a backward runs, and their steps by the keys of tensors.

    | | a | first GEMM | second GEMM |
    |---|---|---|---|
    | forward | ``x [R, K]`` | ``y = x wᵀ + bias [R, N]`` | |
    | backward | ``dy [R, N]`` | ``dx = dy w [R, K]`` | ``dw = dyᵀ x [N, K]`` |

    Attributes:
        a_cast, w_cast: the casts of a and of the weight; None for one whose operand is given, or that is not needed.
        is_forward: whether the first GEMM multiplies the operand of w; otherwise it multiplies that of wᵀ.
        first, second: the GEMMs; None for one that is not computed.
    """

    __slots__ = ("_last", "_steps", "a_cast", "first", "is_forward", "second", "w_cast")

    def __init__(
        self, a_cast: Cast | None, w_cast: Cast | None, is_forward: bool, first: Gemm | None, second: Gemm | None
    ) -> None:
        self.a_cast, self.w_cast, self.is_forward, self.first, self.second = a_cast, w_cast, is_forward, first, second
        self._steps: dict[tuple[Any, ...], Steps] = {}
        self._last: tuple[Key | None, Steps | None] = None, None  # one tuple, since other threads may replace it

    def run(
        self,
        a: Any, a_scale: Any, a_amax: Tensor | None, a_t: Any, a_t_scale: Any,
        w: Any, w_scale: Any, w_amax: Tensor | None, bias: Tensor | None,
        x_t: Any, x_t_scale: Any,
    ) -> tuple[Tensor | None, Tensor | None, Any, Any]:  # fmt: skip
        """The results of the first and of the second GEMM, and of the casts of a and of w.

        Args:
            a, a_scale, a_amax: a tensor, and the scale and amax of its cast; or the codes and scales of an operand.
            a_t, a_t_scale: the operand of aᵀ, if a is not cast.
            w, w_scale, w_amax: as of a; the given operand is that of w or wᵀ.
            bias: added to the result of the first GEMM.
            x_t, x_t_scale: the operand of xᵀ.
        """
        # The scale of a cast is a slot's, or None for all calls.
        of_a, of_w = None if self.a_cast else a_scale, None if self.w_cast else w_scale
        key = _key(a_amax is None, w_amax is None, a, of_a, a_t, a_t_scale, w, of_w, bias, x_t, x_t_scale)
        steps = self.steps_of(key)
        cast_a, cast_w, multiply_first, multiply_second = steps or _OPS
        given = a, a_scale, w, w_scale
        a8 = w8 = first = second = None
        if self.a_cast is not None:
            a8 = cast_a(a, self.a_cast, a_scale, a_amax)  # type: ignore[misc]
            a, a_scale = a8[0], a8[1]
            if self.second is not None:
                a_t, a_t_scale = transposed_operand(a8, self.a_cast)
        if self.w_cast is not None:
            w8 = cast_w(w, self.w_cast, w_scale, w_amax)  # type: ignore[misc]
            w, w_scale = (w8[0], w8[1]) if self.is_forward else transposed_operand(w8, self.w_cast)
        if self.first is not None:
            first = multiply_first(a, a_scale, w, w_scale, self.first, bias, None)  # type: ignore[misc]
        if self.second is not None:
            second = multiply_second(a_t, a_t_scale, x_t, x_t_scale, self.second, None, None)  # type: ignore[misc]
        if steps is None:
            if key is not None:
                self._keep(key, (
                    None if self.a_cast is None else _cast_step(given[0], self.a_cast, given[1], a_amax),
                    None if self.w_cast is None else _cast_step(given[2], self.w_cast, given[3], w_amax),
                    None if self.first is None else _gemm_step(a, a_scale, w, w_scale, self.first, bias),
                    None if self.second is None else _gemm_step(a_t, a_t_scale, x_t, x_t_scale, self.second, None),
                ))  # fmt: skip
            return first, second, a8, w8
        if a_amax is not None:
            increment_version((a_amax,))
        if w_amax is not None:
            increment_version((w_amax,))
        return first, second, a8, w8

    def steps_of(self, key: Key | None) -> Steps | None:
        """The steps of an earlier call with this key, or None."""
        last_key, steps = self._last
        if key != last_key:
            steps = None if key is None else self._steps.get(tuple(key))
            self._last = key, steps
        return steps

    def _keep(self, key: Key, steps: Steps) -> None:
        """Keep the steps of calls with this key, and drop those that were planned before plans were cleared."""
        if len(self._steps) == MAX_KEYS or next(iter(self._steps), (key[0],))[0] != key[0]:
            self._steps = {}
        self._steps[tuple(key)] = steps
        self._last = key, steps


def _key(a_is_unobserved: bool, w_is_unobserved: bool, *tensors: Tensor | None) -> Key | None:
    """All that steps depend on; None if torch's dispatcher must see the ops, or a tensor is of a subclass."""
    if is_watched():
        return None
    key: Key = [plans.generation, a_is_unobserved, w_is_unobserved]
    last = None
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) not in PLAIN_TENSORS or x.is_neg():
            return None
        elif x.dim():
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT, x.get_device())
            last = x
        else:
            key += (x.dtype, x.data_ptr() % ALIGNMENT, x.get_device())
    if last is None or not (last.is_cuda or last.is_cpu):
        return None
    key.append(last.is_cuda and current_device())
    return key


# --- Steps ------------------------------------------------------------------------------------------------------------


def _multiply_by_op(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None, *_: None
) -> Tensor:
    return scaled_mm_op.call(a, scale_a, b, scale_b, gemm, bias)  # type: ignore[no-any-return]


_OPS: Steps = quantize_op.call, quantize_op.call, _multiply_by_op, _multiply_by_op


def _cast_step(x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None) -> Run:
    return _step(quantize_op, x, tensor_key(x), (*cast.key, scale is not None, amax is not None))


def _gemm_step(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None) -> Run:
    if bias is not None and not bias.is_contiguous():
        return scaled_mm_op.implementations[a.device.type]
    of_bias = None if bias is None else tensor_key(bias)
    return _step(scaled_mm_op, a, operand_key(a, scale_a), operand_key(b, scale_b), gemm.flat, of_bias, None)


def _step(op: Op, x: Tensor, *key: Any) -> Run:
    """The function that ``op`` runs for tensors of a ``key`` on the device of ``x``, which has run it before."""
    device = x.device
    plan = op.plans.get(device.type)
    if plan is None:
        return op.implementations[device.type]
    return plan(device, x.is_cuda and current_device(), *key)  # type: ignore[no-any-return]
