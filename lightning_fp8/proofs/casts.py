"""Casts, norms, activations and scales: each check compares one call of an op by its kernels with its specification.

Fused ops compute in float32 in both, but in another order and with other exponentials. If a value is that close to the
middle between two codes, either code is accepted. All other ops have one order of operations, and must be bitwise
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import E4M3, E5M2
from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.activation import gated_backward_quantize_op
from lightning_fp8.ops.cast import (
    observe_op,
    quantize_columns_op,
    reference_quantize,
    reference_quantize_columns,
    tensor_amax,
)
from lightning_fp8.ops.norm import Norm, norm_backward_op, rms_norm_op
from lightning_fp8.ops.op import Op
from lightning_fp8.ops.scales import update_scales_op
from lightning_fp8.ops.transpose import transpose_op
from lightning_fp8.proofs.comparing import (
    assert_aligned,
    assert_close,
    assert_operands,
    assert_same,
    assert_within,
    kernels_of,
    part_of,
    parts_of,
    reference_of,
    require,
)
from lightning_fp8.proofs.drawing import moved


def check_cast(
    op: Op, inputs: Sequence[Any], cast: Cast, device: str, *,
    scale: float | None = None, amax: float | None = None, exact: bool = False,
) -> None:  # fmt: skip
    """Check an op that casts: both operands, its other results, and the amax.

    An op that casts two tensors is given half the scale, and four times the amax, for the second one.

    Args:
        op: the op.
        inputs: the op's arguments before the cast, on the CPU.
        cast: how to cast.
        device: the device on which kernels run.
        scale: the given scale; 0 is not set yet, None computes the tensor's own.
        amax: the amax before the call; None collects none.
        exact: whether results must be bitwise equal.
    """
    results, collected = [], []
    tensors = 2 if op is gated_backward_quantize_op else 1
    for side, on in ((kernels_of(op), device), (reference_of(op), "cpu")):
        scales = [None if scale is None else torch.tensor(scale / 2**n, device=on) for n in range(tensors)]
        amaxes = [None if amax is None else torch.tensor(amax * 4**n, device=on) for n in range(tensors)]
        results.append(side(*(moved(x, on) for x in inputs), cast, *scales, *amaxes))
        collected.append(amaxes)
    actual, expected = results
    for first in range(0, 4 * tensors, 4):
        assert_operands(actual[first : first + 4], expected[first : first + 4], exact)
    for index in range(4 * tensors, len(expected)):
        assert_close(actual[index], expected[index], f"result {index}")
    for largest, right in zip(*collected):
        if largest is None or right is None:
            continue
        if exact:
            assert_same(largest, right, "amax")
        else:
            assert_within(largest, right, 1e-6, 0.0, "amax")


def parts_of_cast(
    x: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None
) -> Callable[[Sequence[Tensor]], None]:
    """A check of the results that ``quantize`` will give for these arguments, bit by bit.

    It casts the first and last rows of each operand again, on the device of ``x``.
    """
    before = None if amax is None else amax.clone()

    def check(results: Sequence[Tensor]) -> None:
        used = scale
        if cast.layout.has_one_scale:
            if scale is None or not cast.scale_is_nonzero:
                options = (cast.power_2_scale, cast.amax_epsilon) if scale is None else ()
                own = scaling.current_scale(tensor_amax(x), cast.float8.max, *options)
                used = own if scale is None else torch.where(scale == 0, own, scale)
            assert used is not None
            assert_same(results[1], scaling.inverse(used), "scale_inv")
        for dim, is_made in enumerate((cast.rowwise, cast.columnwise)):
            usage, of_operand = cast.usage(dim == 0, dim == 1, True), slice(2 * dim, 2 * dim + 2)
            for part in parts_of(x.shape[dim]) if is_made else ():
                rows = x[part] if dim == 0 else x[:, part]
                with torch.compiler.set_stance("force_eager"):
                    codes, scales = reference_quantize(rows, usage, used, None)[of_operand]
                data, scale_inv = results[of_operand]
                actual = part_of(data, scale_inv, cast.layout, part)
                assert_same(actual.data, codes, "codes")
                assert_same(actual.scale_inv, scales, "scale_inv")
        if amax is not None and before is not None:
            assert_same(amax, torch.maximum(before, tensor_amax(x)), "amax")

    return check


def parts_of_experts(
    w: Tensor, cast: Cast, scale: Tensor | None, amax: Tensor | None
) -> Callable[[Sequence[Tensor]], None]:
    """:func:`parts_of_cast` for ``quantize_experts``: of the last expert, or of all as one matrix with one scale."""
    one = cast.layout.has_one_scale
    usage = cast.usage(True, False, cast.scale_is_nonzero) if one else cast
    check_one = parts_of_cast(w.flatten(0, 1) if one else w[-1], usage, scale, amax)

    def check(results: Sequence[Tensor]) -> None:
        data, scale_inv, data_t, _ = results
        if not one:
            check_one([each[-1] if each.numel() else each for each in results])
            return
        for codes in (*[data] * cast.rowwise, *[data_t.mT] * cast.columnwise):
            check_one((codes.flatten(0, 1), scale_inv))

    return check


def parts_of_columns(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Callable[[Tensor], None]:
    """A check of the codes that ``quantize_columns`` will give: of the first and last rows, bit by bit."""

    def check(codes: Tensor) -> None:
        for part in parts_of(x.shape[0]):
            with torch.compiler.set_stance("force_eager"):
                assert_same(codes[part], reference_quantize_columns(x[part], scale, dtype), "codes")

    return check


def check_quantize_columns(x: Tensor, dtype: torch.dtype, device: str) -> None:
    """Check the cast with a given scale per column."""
    # Include scales of NaN, infinity and 0 if there are enough columns.
    scale = torch.exp2(torch.linspace(-10, 14, x.shape[1])) * 1.1
    scale[5:8] = torch.tensor([torch.nan, torch.inf, 0.0])[: len(scale[5:8])]
    actual = kernels_of(quantize_columns_op)(moved(x, device), scale.to(device), dtype)
    assert_same(actual, reference_of(quantize_columns_op)(x, scale, dtype), "codes")
    assert_aligned(actual)


def check_transpose(codes: Tensor, device: str) -> None:
    """Check that codes are transposed, into rows that are aligned as a GEMM operand's."""
    actual = kernels_of(transpose_op)(moved(codes.view(torch.uint8), device).view(codes.dtype))
    require(actual.dtype == codes.dtype, f"{actual.dtype} for {codes.dtype}")
    wrong = int((actual.view(torch.uint8).cpu() != codes.view(torch.uint8).mT).sum())
    require(not wrong, f"{wrong} of {codes.numel()} codes are in the wrong place")
    assert_aligned(actual.flatten(0, -2))


def check_observe(x: Tensor, amax: float, device: str) -> None:
    """Check that ``amax`` becomes the maximum of itself and the values' magnitudes."""
    actual, expected = torch.tensor(amax, device=device), torch.tensor(amax)
    kernels_of(observe_op)(moved(x, device), actual)
    reference_of(observe_op)(x, expected)
    assert_same(actual, expected, "amax")


def check_update_scales(length: int, n: int, device: str, *, margin: float = 0.0, algorithm: str = "max") -> None:
    """Check the update of ``n`` delayed scales with histories of ``length`` steps; amaxes include 0, inf and NaN."""
    generator = torch.Generator().manual_seed(length + n)
    amax = torch.rand(n, generator=generator) * 10
    amax[0], amax[n // 2], amax[-1] = 0.0, torch.nan, torch.inf
    amax_history, scale = torch.rand(length, n, generator=generator), torch.rand(n, generator=generator)
    amax_history[:, n // 3] = 0.0
    fp8_max = torch.where(torch.rand(n, generator=generator) < 0.5, E4M3.max, E5M2.max)
    amax[1 : n // 3 : 2] = 1e-38  # the scale overflows float32
    amax[n // 3], fp8_max[n // 3] = 1e-36, E4M3.max  # overflows only without the margin
    results = []
    for update, on in ((kernels_of(update_scales_op), device), (reference_of(update_scales_op), "cpu")):
        state = [tensor.to(on, copy=True) for tensor in (amax, amax_history, scale)]
        update(*state, fp8_max.to(on), margin, algorithm)
        results.append(state)
    for name, a, b in zip(("amax", "amax_history", "scale"), *results):
        assert_same(a, b, name)


def check_rms_norm(x: Tensor, weight: Tensor, norm: Norm, dtype: torch.dtype, rounds_first: bool, device: str) -> None:
    """Check RMSNorm in high precision."""
    actual = kernels_of(rms_norm_op)(moved(x, device), moved(weight, device), norm, dtype, rounds_first)
    expected = reference_of(rms_norm_op)(x, weight, norm, dtype, rounds_first)
    for name, a, b in zip(("y", "statistics"), actual, expected):
        assert_close(a, b, name)


def check_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, norm: Norm, bias_gradient: bool, device: str) -> None:
    """Check the gradients of a norm of ``x``."""
    means = torch.zeros(x.shape[0]) if norm.rms else x.float().mean(1)
    rstd = torch.rsqrt((x.float() - means[:, None]).square().mean(1) + 1e-5)
    arguments = dy, x, weight, rstd[None] if norm.rms else torch.stack((means, rstd))
    actual = kernels_of(norm_backward_op)(*(moved(tensor, device) for tensor in arguments), norm, bias_gradient)
    expected = reference_of(norm_backward_op)(*arguments, norm, bias_gradient)
    for name, a, b in zip(("dx", "dweight", "dbias"), actual, expected):
        assert_close(a, b, name)
