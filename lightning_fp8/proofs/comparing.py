"""Comparisons of kernels' results with the specification. They raise, also under ``python -O``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic
from torch import Tensor

from cuda_kernels.device.sizes import ceil_div
from lightning_fp8.numerics.scaled import Layout, ScaledTensor
from lightning_fp8.ops.op import Op

NEIGHBOURS = 0.005
"""Fraction of codes that may differ by one if kernel and specification round in another order."""

ROWS = 128
"""Rows of a part of a training's tensors that is compared: a multiple of every block of scales."""

_deterministic: Any = torch.utils.deterministic  # its attribute is a property of the module's class


class WrongResult(AssertionError):
    """A kernel's result differs from its specification."""


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """Fill new allocations with NaN, to expose elements that a kernel does not write."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    _deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        _deterministic.fill_uninitialized_memory = before[2]


def kernels_of(op: Op) -> Callable[..., Any]:
    """The op's implementation by kernels, for tensors on any device; trailing arguments may be omitted.

    New memory is filled with NaN, so that no result is right by chance.
    """
    side = _side(op, "cuda")

    def call(*args: Any) -> Any:
        with nan_in_new_memory():
            return side(*args)

    return call


def reference_of(op: Op) -> Callable[..., Any]:
    """The op's specification in plain torch."""
    return _side(op, "cpu")


def _side(op: Op, device_type: str) -> Callable[..., Any]:
    function, num_arguments = op.implementations[device_type], len(op.types())
    return lambda *args: function(*args, *[None] * (num_arguments - len(args)))


def require(holds: bool, problem: str) -> None:
    """Check a condition.

    Raises:
        WrongResult: ``holds`` is False.
    """
    if not holds:
        raise WrongResult(problem)


def assert_same(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check bitwise equality, except for the payload of NaNs; devices may differ."""
    actual, expected = actual.cpu(), expected.cpu()
    _require_alike(actual, expected, what)
    if actual.dtype == torch.float8_e8m0fnu:
        a, b = actual.view(torch.uint8), expected.view(torch.uint8)
    else:
        a, b = actual.float(), expected.float()
        require(torch.equal(a.isnan(), b.isnan()), f"{what}: NaN in other places")
        a, b = (x.masked_fill(x.isnan(), 0.0).view(torch.int32) for x in (a, b))
    wrong = (a != b).nonzero()
    if len(wrong):
        raise WrongResult(f"{what}: {len(wrong)} of {a.numel()} differ, first at {wrong[0].tolist()}")


def assert_padded_with_zeros(codes: Tensor) -> None:
    """Check that the padding of rows of codes is 0, as GEMMs require; rows with NaN are excepted."""
    codes = codes.flatten(0, 1) if codes.dim() == 3 else codes
    if codes.numel() and codes.dim() == 2 and codes.stride(0) > codes.shape[1]:
        whole = codes.view(torch.uint8).as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1))
        gap = whole[~codes.float().isnan().any(1), codes.shape[1] :]
        require(not gap.any(), "the padding of codes is not 0")


def assert_aligned(codes: Tensor) -> None:
    """Check that rows of an operand's codes start at multiples of 16 bytes, and that their padding is 0."""
    rows_begin = codes.stride(1) == 1 and codes.stride(0) % 16 == codes.data_ptr() % 16 == 0
    require(rows_begin, f"rows of codes are not aligned: strides {codes.stride()}")
    whole = codes.view(torch.uint8).as_strided((codes.shape[0], codes.stride(0)), (codes.stride(0), 1))
    require(not whole[:, codes.shape[1] :].any(), "the padding of codes is not 0")


def assert_close_codes(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check that codes are equal except for a few neighbours, and that NaNs are equal."""
    actual, expected = actual.cpu(), expected.cpu()
    _require_alike(actual, expected, what)
    missing = expected.float().isnan()
    require(torch.equal(actual.float().isnan(), missing), f"{what}: NaN in other places")
    apart = (_steps(actual) - _steps(expected)).abs()[~missing]
    far, off = int((apart > 1).sum()), int((apart > 0).sum())
    require(far == 0, f"{what}: {far} of {apart.numel()} codes are not neighbours of the expected codes")
    require(off <= max(1, NEIGHBOURS * apart.numel()), f"{what}: {off} codes of {apart.numel()} differ")


def _steps(codes: Tensor) -> Tensor:
    """FP8 codes as integers in the order of their values; -0 equals 0."""
    bits = codes.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """Check equality up to the order of a sum and the last rounding."""
    relative = {torch.float32: 2e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[expected.dtype]
    largest = expected.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).abs().max() if expected.numel() else 0.0
    absolute = 2e-5 * float(largest)
    assert_within(actual, expected, relative, absolute, what)


def assert_within(actual: Tensor, expected: Tensor, relative: float, absolute: float, what: str) -> None:
    """Check ``|actual - expected| <= absolute + relative |expected|``; NaN must equal NaN."""
    actual = actual.cpu()
    _require_alike(actual, expected, what)
    if torch.allclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True):
        return
    off = ~torch.isclose(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    first = off.nonzero()[0].tolist()
    pair = f"{actual[tuple(first)]} for {expected[tuple(first)]}"
    raise WrongResult(f"{what}: {int(off.sum())} of {off.numel()} differ, first at {first}: {pair}")


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``‖actual - expected‖ / ‖expected‖`` in float64; NaN if ``actual`` has a NaN."""
    a, b = actual.cpu().double(), expected.cpu().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-300))


def assert_rows_within(actual: Tensor, exact: Tensor, magnitude: Tensor, slack: float, what: str) -> None:
    """Check each row of products ``[R, C]`` that may have come from a short accumulator, on the device of ``actual``.

    The error of a row is at most ``‖exact‖ / 32``, plus ``slack`` times ``‖magnitude‖`` for sums that cancel. Hopper's
    accumulator has relative errors of up to 2 % (DeepSeek-V3, arXiv:2412.19437), and rounding smaller ones; a wrong
    tile has larger ones. Values beyond the range of the result's dtype are not compared. NaN must stay NaN.

    Args:
        exact: the products in float64; ``magnitude``: the sums of the absolute values of their terms.
    """
    limits = torch.finfo(actual.dtype)
    beyond = ~(exact.abs() < limits.max)
    off, size, terms = (
        each.masked_fill(beyond, 0.0).norm(dim=1) for each in (actual.double() - exact, exact, magnitude)
    )
    tiniest = limits.smallest_normal * limits.eps * math.sqrt(actual.shape[1])
    wrong = int((~(off <= size / 32 + slack * terms + tiniest)).sum())
    require(not wrong, f"{what}: {wrong} of {len(off)} rows have larger errors than rounding explains")
    require(not (exact.isnan() & ~actual.isnan()).any(), f"{what}: NaN is lost")


def parts_of(size: int) -> list[slice]:
    """The first and the last rows of ``size``, :data:`ROWS` or fewer."""
    last = (size - 1) // ROWS * ROWS
    return [slice(0, min(size, ROWS)), *([slice(last, size)] if last else [])]


def part_of(data: Tensor, scale_inv: Tensor, layout: Layout, part: slice) -> ScaledTensor:
    """These rows of an operand, which begin with a block of scales."""
    if (block := layout.block[0]) is not None:
        scale_inv = scale_inv[part.start // block : ceil_div(part.stop, block)]
    return ScaledTensor(data[part], scale_inv, layout)


def assert_operands(actual: Sequence[Tensor], expected: Sequence[Tensor], exact: bool) -> None:
    """Check both operands of a cast and their scales; without ``exact``, up to the rounding of a fused op."""
    for at, name in enumerate(("data", "scale_inv", "data_t", "scale_inv_t")):
        codes = expected[at].element_size() == 1
        if exact or (codes and expected[at].dtype == torch.float8_e8m0fnu):
            assert_same(actual[at], expected[at], name)
        elif codes:
            assert_close_codes(actual[at], expected[at], name)
        else:
            assert_within(actual[at], expected[at], 1e-6, 0.0, name)
    assert_padded_with_zeros(actual[0])
    assert_padded_with_zeros(actual[2])


def _require_alike(actual: Tensor, expected: Tensor, what: str) -> None:
    alike = actual.shape == expected.shape and actual.dtype == expected.dtype
    require(alike, f"{what}: {actual.dtype} {list(actual.shape)} for {expected.dtype} {list(expected.shape)}")
