"""The cases of a plan: calls that start its kernels on tensors that are small, ragged, or fill the GPU twice.

A plan's key contains dtypes, options and alignment of tensors. Its cases have tensors of the same alignment and other
sizes, so that they run the same machine code. Rows of a norm have the plan's length, since its kernels depend on it.
Whatever machine code does not depend on, such as masks, margins, or whether a scale is given, is varied by the cases
rather than taken from the key: another plan with the same machine code needs no proof.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cuda_kernels.attention.backward.memory import FLUSH
from cuda_kernels.attention.host.order import assuming_l2_bytes, least_heads
from cuda_kernels.gemm.spec import GemmConfig
from cuda_kernels.host import gemm_selection, launch
from cuda_kernels.host.gemm_configs import KernelConfig, Library, fastest_by_estimate, legal_configs
from lightning_fp8.attention.ops import Band
from lightning_fp8.numerics.scaled import Cast
from lightning_fp8.ops.activation import (
    activated_shape,
    activation_backward_quantize_op,
    activation_quantize_op,
    gated_backward_quantize_op,
    gated_quantize_op,
    is_gated,
)
from lightning_fp8.ops.cast import quantize_op
from lightning_fp8.ops.cast_cuda import CastVariant, variant_of
from lightning_fp8.ops.gemm import Gemm
from lightning_fp8.ops.gemm_cuda import BoundGemm, GemmOperand, bind_gemm, build_gemm
from lightning_fp8.ops.grouped import quantize_experts_op
from lightning_fp8.ops.grouped_cuda import build_grouped_gemm, rows_of_all
from lightning_fp8.ops.memory import OperandKey, PlainKey, TensorKey, operand_key, tensor_key
from lightning_fp8.ops.norm import Norm, norm_quantize_op
from lightning_fp8.ops.op import Op
from lightning_fp8.proofs import attention
from lightning_fp8.proofs.attention import Problem
from lightning_fp8.proofs.casts import (
    check_cast,
    check_norm_backward,
    check_observe,
    check_quantize_columns,
    check_rms_norm,
    check_transpose,
    check_update_scales,
)
from lightning_fp8.proofs.drawing import every_code, like, sample, values, with_peaks
from lightning_fp8.proofs.products import check_grouped_product, check_product

LARGE = 2**21
"""Elements of a large tensor."""
RESIDUE = 16
"""Sizes of a case equal the plan's sizes modulo this number, on which the choice of machine code depends."""


@dataclass(frozen=True)
class Case:
    """One call and its check.

    Attributes:
        name: the case's name.
        run: starts the kernels on a device, and raises if a result is wrong.
    """

    name: str
    run: Callable[[str], None]


def cases_of(plan: str, key: tuple[Any, ...]) -> list[Case]:
    """The cases of a plan, by the plan's name and key."""
    return list(CASES[plan](*key))


def _waves(device: str, blocks_per_multiprocessor: int = 4) -> int:
    """Number of blocks that exceeds two waves on ``device``, if so many run on a multiprocessor at a time."""
    return 2 * blocks_per_multiprocessor * launch.multiprocessors(torch.device(device)) + 1


def _sized(check: Callable[..., None], columns: int) -> Iterator[Case]:
    """Cases of tensors for tiles of 128 × 128; ``check`` takes rows, columns, a device, and options.

    The ragged case has a gap between rows, and rows that end within the padding of codes.
    """
    rest = columns % RESIDUE
    yield Case("small", partial(check, 128, 128 + rest))
    yield Case("ragged", partial(check, 140, 272 + (rest or 8), gap=2 * RESIDUE))
    yield Case("not finite", partial(check, 140, 272 + rest, special=True))
    yield Case("waves", lambda device: check(-(-_waves(device) // 9) * 128 + 5, 1040 + rest, device))


def _with_special(x: Tensor) -> Tensor:
    """``x`` with NaN and both infinities, in different rows and columns."""
    x[5, 7], x[77, 130], x[100, 3] = torch.nan, torch.inf, -torch.inf
    return x


# --- Casts ------------------------------------------------------------------------------------------------------------


def _check_variant(op: Op, inputs: tuple[Any, ...], variant: CastVariant, exact: bool, device: str) -> None:
    """Run with each way to give a scale, the plan's first. Amaxes are collected only with given scales.

    Machine code does not depend on the way, so that large tensors, whose specification takes long, have the first only.
    """
    cast, amax = variant.cast, 0.25 if variant.has_amax else None
    own = replace(cast, scale_is_nonzero=False)
    ways: list[tuple[Cast, float | None]] = []
    if cast.layout.has_one_scale:
        ways = [(own, 0.0), (replace(cast, scale_is_nonzero=True), 3.7)]
        if variant.scale_is_known:
            ways.reverse()
    if not variant.has_amax:
        ways += [(replace(own, power_2_scale=power_2, amax_epsilon=power_2 / 2), None) for power_2 in (False, True)]
    for way, scale in ways if inputs[0].numel() <= LARGE else ways[:1]:
        check_cast(op, inputs, way, device, scale=scale, amax=amax, exact=exact)


def _quantize(x_key: PlainKey, variant_key: Any, experts: int = 0) -> Iterator[Case]:
    op, shape = (quantize_experts_op, (2, -1)) if experts else (quantize_op, (-1,))

    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        x = sample(rows * len(shape), columns, x_key[0])
        x = like(x_key, _with_special(x) if special else x, gap).unflatten(0, shape)
        _check_variant(op, (x,), variant_of(variant_key), True, device)

    return _sized(check, x_key[1][-1])


def _activation(x_key: PlainKey, variant_key: Any, activation: str) -> Iterator[Case]:
    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        x = values(rows, 2 * columns if is_gated(activation) else columns, x_key[0], spread=2.0)
        x = like(x_key, _with_special(x) if special else x, gap)
        exact = _has_one_order(activation)
        _check_variant(activation_quantize_op, (x, activation), variant_of(variant_key), exact, device)

    return _sized(check, activated_shape(activation, torch.Size(x_key[1]))[1])


def _activation_backward(
    x_key: PlainKey, dy_key: PlainKey, activation: str, bias_dtype: torch.dtype | None, variant_key: Any
) -> Iterator[Case]:
    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        x = like(x_key, values(rows, 2 * columns if is_gated(activation) else columns, x_key[0], spread=2.0), gap)
        dy = values(rows, columns, dy_key[0], seed=1)
        dy = like(dy_key, _with_special(dy) if special else dy, gap)
        inputs = dy, x, activation, bias_dtype
        variant, exact = variant_of(variant_key), _has_one_order(activation)
        _check_variant(activation_backward_quantize_op, inputs, variant, exact, device)

    return _sized(check, dy_key[1][-1])


def _gated(op: Op, *key: Any) -> Iterator[Case]:
    *keys, variant_key, activation = key

    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        first, *others = (values(rows, columns, key[0], seed=seed, spread=2.0) for seed, key in enumerate(keys))
        drawn = _with_special(first) if special else first, *others
        inputs = *(like(key, x, gap) for key, x in zip(keys, drawn)), activation
        _check_variant(op, inputs, variant_of(variant_key), activation == "relu", device)

    return _sized(check, keys[0][1][-1])


def _has_one_order(activation: str) -> bool:
    """Whether the activation has no exponential, so that kernel and specification compute the same products."""
    return "relu" in activation or "reglu" in activation


def _quantize_columns(x_key: PlainKey, dtype: torch.dtype) -> Iterator[Case]:
    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        x = sample(rows, columns, x_key[0])
        check_quantize_columns(like(x_key, _with_special(x) if special else x, gap), dtype, device)

    return _sized(check, x_key[1][-1])


def _transpose(key: PlainKey, experts: int) -> Iterator[Case]:
    shape = (2, -1) if experts else (-1,)

    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        codes = like(key, every_code(rows * len(shape), columns, key[0]), gap)
        check_transpose(codes.unflatten(0, shape), device)

    return _sized(check, key[1][-1])


def _observe(x_key: PlainKey) -> Iterator[Case]:
    def check(rows: int, columns: int, device: str, gap: int = 0, special: bool = False) -> None:
        for peak, amax in ((0, 0.25), (-1, 0.25), (-1, 1e30)):
            x = with_peaks(sample(rows, columns, x_key[0]), peak)
            check_observe(like(x_key, _with_special(x) if special else x, gap), amax, device)

    return _sized(check, x_key[1][-1])


def _update_scales(shape: tuple[int, int], margin: float, algorithm: str) -> Iterator[Case]:
    for name, length, n, digits in (("small", 16, 5, 0.0), ("ragged", 1024, 70, 1.0), ("waves", 257, 40_009, 0.0)):
        yield Case(name, partial(check_update_scales, length, n, margin=digits, algorithm=algorithm))


# --- Norms ------------------------------------------------------------------------------------------------------------

MOST_ELEMENTS = 2**23
"""Elements of a norm's case; the specification takes some tenths of a second for them."""


def _of_rows(check: Callable[..., None], columns: int, formula: Norm) -> Iterator[Case]:
    """Cases of rows of ``columns`` elements; ``check`` takes the number of rows, a formula, a device, and options.

    The formulas differ in kernel parameters: epsilon, and whether the weight is gamma - 1.
    """
    one, other = formula._replace(eps=1e-5, zero_centered=False), formula._replace(eps=1e-2, zero_centered=True)
    yield Case("small", partial(check, 5, one))
    yield Case("ragged", partial(check, 53, other, gap=2 * RESIDUE))
    yield Case("not finite", partial(check, 53, one, special=True))

    def waves(device: str) -> None:
        check(min(16 * _waves(device), max(_waves(device), MOST_ELEMENTS // columns)) + 7, one, device)

    yield Case("waves", waves)


def _parameters(columns: int, dtype: torch.dtype, misalignment: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a norm."""
    key = dtype, torch.Size((columns,)), (1,), misalignment
    weight, bias = (like(key, values(1, columns, dtype, seed=seed)[0]) for seed in (1, 2))
    return weight, bias if has_bias else None


def _norm(
    x_key: PlainKey, weight_dtype: torch.dtype, misalignment: int, has_bias: bool, norm: tuple[Any, ...],
    variant_key: Any,
) -> Iterator[Case]:  # fmt: skip
    columns = x_key[1][1]

    def check(rows: int, formula: Norm, device: str, gap: int = 0, special: bool = False) -> None:
        x = values(rows, columns, x_key[0]) + (0.0 if formula.rms else 3.0)
        if special:
            x[5, 7 % columns] = torch.nan
        parameters = _parameters(columns, weight_dtype, misalignment, has_bias)
        if rows > 1:  # one value alone, far above epsilon, in the channel of the largest gamma: the largest result
            gamma = parameters[0].float() + formula.zero_centered
            x[-1] = 0.0
            x[-1, gamma.abs().argmax()] = 64.0
        inputs = like(x_key, x, gap), *parameters, formula
        _check_variant(norm_quantize_op, inputs, variant_of(variant_key), False, device)

    return _of_rows(check, columns, Norm(*norm))


def _rms_norm(
    x_key: PlainKey, weight_dtype: torch.dtype, misalignment: int, norm: tuple[Any, ...], dtype: torch.dtype,
    rounds_first: bool,
) -> Iterator[Case]:  # fmt: skip
    columns = x_key[1][1]

    def check(rows: int, formula: Norm, device: str, gap: int = 0, special: bool = False) -> None:
        x = values(rows, columns, x_key[0])
        if special:
            x[5, 7 % columns] = torch.nan
        weight, _ = _parameters(columns, weight_dtype, misalignment, False)
        check_rms_norm(like(x_key, x, gap), weight, formula, dtype, rounds_first, device)

    return _of_rows(check, columns, Norm(*norm))


def _norm_backward(
    x_key: PlainKey, dy_key: PlainKey, weight_dtype: torch.dtype, misalignment: int, norm: tuple[Any, ...],
    bias_gradient: bool,
) -> Iterator[Case]:  # fmt: skip
    columns = x_key[1][1]

    def check(rows: int, formula: Norm, device: str, gap: int = 0, special: bool = False) -> None:
        x = like(x_key, values(rows, columns, x_key[0]) + (0.0 if formula.rms else 3.0), gap)
        dy = values(rows, columns, dy_key[0], seed=3)
        if special:
            dy[5, 7 % columns] = torch.nan
        weight, _ = _parameters(columns, weight_dtype, misalignment, False)
        check_norm_backward(like(dy_key, dy, gap), x, weight, formula, bias_gradient, device)

    return _of_rows(check, columns, Norm(*norm))


# --- Products ---------------------------------------------------------------------------------------------------------


def _gemm(
    a_key: OperandKey, b_key: OperandKey, flat: tuple[Any, ...], bias_key: PlainKey | None, out_key: PlainKey | None,
    tile: tuple[int, ...] | None = None,
) -> Iterator[Case]:  # fmt: skip
    """Cases for the tile chosen for the plan on the device, or for ``tile``: see :func:`tile_of`."""
    gemm = Gemm.from_flat(*flat)
    (m, k), n = a_key[1], b_key[1][0]
    rest_m, rest_n, rest_k = m % RESIDUE, n % RESIDUE, k % RESIDUE

    def check(
        shape: Callable[[KernelConfig, str], tuple[int, int, int]], exact: bool, device: str, gap: int = 0
    ) -> None:
        where = torch.device(device)
        of_bias, of_out = (None if key is None else TensorKey(*key, where) for key in (bias_key, out_key))
        config = _config(_bound(where, a_key, b_key, gemm, bias_key=of_bias, out_key=of_out), tile)

        def multiply(
            a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, gemm: Gemm, bias: Tensor | None, out: Tensor | None
        ) -> Tensor:
            added, before = (None if each is None else TensorKey(*tensor_key(each), where) for each in (bias, out))
            keys = operand_key(a, scale_a), operand_key(b, scale_b)
            bound = _bound(where, *keys, gemm, bias_key=added, out_key=before)
            return build_gemm(bound, config)(a, scale_a, b, scale_b, gemm, bias, out)

        check_product(
            (gemm.layout_a, gemm.layout_b), shape(config, device), device, multiply=multiply,
            formats=(a_key[0], b_key[0]), out=gemm.out_dtype, bias=None if bias_key is None else bias_key[0],
            accumulate=out_key is not None, fast=gemm.fast_accum, exact=exact, gap=gap,
        )  # fmt: skip

    def waves(config: KernelConfig, device: str) -> tuple[int, int, int]:
        side = int(_waves(device, 1) ** 0.5) + 1
        return side * config.tile_m + rest_m, side * config.tile_n + RESIDUE + rest_n, 272 + rest_k

    yield Case("small", partial(check, lambda *_: (16 + rest_m, 16 + rest_n, 16 + rest_k), True))
    yield Case("ragged", partial(check, lambda *_: (304 + rest_m, 272 + rest_n, 1296 + rest_k), True, gap=2 * RESIDUE))
    yield Case("not exact", partial(check, lambda *_: (144 + rest_m, 272 + rest_n, 656 + rest_k), False))
    yield Case("waves", partial(check, waves, True))


def _grouped_gemm(
    a_key: OperandKey, b_key: OperandKey, groups: int, flat: tuple[Any, ...], tile: tuple[int, ...] | None = None
) -> Iterator[Case]:
    """Cases for the tile of the plan on the device, or for ``tile``."""
    gemm = Gemm.from_flat(*flat)

    def check(
        sizes: Callable[[int, str], Sequence[int]], shape: tuple[int, int], exact: bool, device: str, rest: int = 0
    ) -> None:
        where = torch.device(device)
        config = _config(_bound(where, a_key, b_key, gemm, groups=groups), tile)

        def multiply(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, offs: Tensor, gemm: Gemm) -> Tensor:
            of_b = operand_key(*rows_of_all(b, scale_b))
            bound = _bound(where, operand_key(a, scale_a), of_b, gemm, groups=len(offs))
            return build_grouped_gemm(bound, config)(a, scale_a, b, scale_b, offs, gemm)

        given, formats = sizes(config.tile_m, device), (a_key[0], b_key[0])
        check_grouped_product(gemm, given, shape, device, multiply=multiply, formats=formats, exact=exact, rest=rest)

    yield Case("small", partial(check, lambda *_: (3, 0, 17), (16, 16), True))
    yield Case("ragged", partial(check, lambda m, _: (0, 70, m + 1, 0, 1, 2 * m, 37), (272, 1296), True, rest=140))
    yield Case("not exact", partial(check, lambda m, _: (m + 1, 0, 70), (144, 656), False))
    yield Case("waves", partial(check, lambda m, device: (m + 5, 9) * _waves(device, 1), (16, 272), True))
    yield Case("long", partial(check, lambda *_: (3, 0, 17), (16, 4304), True))  # scales of blocks are loaded again


def _bound(where: torch.device, a_key: OperandKey, b_key: OperandKey, gemm: Gemm, **more: Any) -> BoundGemm:
    of_a, of_b = GemmOperand.from_key(gemm.layout_a, a_key, where), GemmOperand.from_key(gemm.layout_b, b_key, where)
    return bind_gemm(where, of_a, of_b, gemm, **more)


def _config(bound: BoundGemm, tile: tuple[int, ...] | None) -> KernelConfig:
    """The config of the plan's kernel, or of the kernel it falls back to."""
    if tile is not None:
        return next(config for config in legal_configs(bound.problem) if tile_of(config) == tile)
    choice = gemm_selection.choose_gemm_on(launch.name_of(bound.device), bound.problem)
    choice = fastest_by_estimate(bound.problem) if isinstance(choice, Library) else choice
    assert not isinstance(choice, Library)
    return choice


def tile_of(config: KernelConfig) -> tuple[int, ...]:
    """A config as a tuple: on Hopper warpgroups, waves of 64 rows, and columns; otherwise rows and columns."""
    if isinstance(config, GemmConfig):
        return config.mma_warpgroups, config.waves, config.tile_n
    return config.tile_m, config.tile_n


# --- Attention --------------------------------------------------------------------------------------------------------


Shifts = tuple[int, int, int, int]
"""For q, k, v and the gradient of o: see :class:`~lightning_fp8.proofs.attention.Problem`."""


def _problems(
    call_key: Any, dtype: torch.dtype, channels: int, shifted: Shifts, lengths_come: bool = True, backward: bool = False
) -> Iterator[tuple[str, Callable[[str], Problem]]]:
    """Problems by name, as functions of a device: masks, head groups, formats and ways to pass lengths.

    They run the same machine code.

    Args:
        lengths_come: whether the op supports sequence lengths.
        backward: whether the op is the backward pass, which adds to sums in global memory if there are many queries.
    """
    centered = call_key[0][4]
    common: dict[str, Any] = {"channels": channels, "centered": centered, "dtype": dtype, "shifted": shifted}
    problems = {
        "small": Problem("bshd", ((128, 128),), heads=(2, 2), uniform=True, **common),
        "causal": Problem(
            "bshd", ((140, 300),), heads=(4, 1), band=CAUSAL, uniform=True, scale=0.03, magnitude=1000, **common
        ),
        "window": Problem("bshd", ((260, 260),), heads=(2, 1), band=Band(40, 20), uniform=True, **common),
    }  # fmt: skip
    if lengths_come:
        lengths = (1, 60), (130, 3), (0, 5), (140, 300)
        problems["lengths"] = Problem(
            "thd", lengths, heads=(2, 1), band=Band(right=0), tail=140, shared=True, longest_query=140, **common
        )
        problems["padded"] = Problem("sbhd", ((140, 20), (60, 130)), heads=(2, 2), tail=2, **common)
    problems["many keys"] = Problem("bshd", ((130, MANY_KEYS),), heads=(1, 1), uniform=True, **common)
    if backward:
        problems["many queries"] = Problem("bshd", ((FLUSH + 80, 130),), heads=(2, 1), uniform=True, **common)
    for name, problem in problems.items():
        yield name, partial(_same, problem)

    def waves(device: str) -> Problem:
        """Three tiles per head, in two sections of heads."""
        section = least_heads(3, torch.device(device))
        most_heads = next(few for few in itertools.count(3) if section % few)
        return Problem("bshd", ((260, 260),), (2 * section,) * 2, uniform=True, most_heads=most_heads, **common)

    yield "waves", waves


CAUSAL = Band(right=0, bottom_right=True)
MANY_KEYS = 1300
"""Keys of more tiles than twice the stages of any ring, each of which is then refilled twice."""


def _same(problem: Problem, device: str) -> Problem:
    return problem


def _shift(key: PlainKey) -> int:
    """1 for a tensor whose elements cannot be read in vectors of four, else 0."""
    dtype, _, strides, misalignment = key
    return int(misalignment % (4 * dtype.itemsize) != 0 or any(stride % 4 for stride in strides[:-1]))


def _attention_forward(q_key: PlainKey, k_key: PlainKey, v_key: PlainKey, call_key: Any) -> Iterator[Case]:
    shifted = _shift(q_key), _shift(k_key), _shift(v_key), 0
    return _attention(attention.check_forward, _problems(call_key, q_key[0], q_key[1][-1], shifted))


def _attention_backward(do_key: PlainKey, heads: int, key_rows: int, call_key: Any) -> Iterator[Case]:
    problems = _problems(call_key, do_key[0], do_key[1][-1], (0, 0, 0, _shift(do_key)), backward=True)
    return _attention(attention.check_backward, problems)


def _attention_forward_of_codes(q_key: PlainKey, heads: int, key_rows: int, call_key: Any) -> Iterator[Case]:
    problems = _problems(call_key, q_key[0], q_key[1][-1], (_shift(q_key), 0, 0, 0), lengths_come=False)
    return _attention(attention.check_forward_of_codes, problems)


def _attention(
    check: Callable[[Problem, str], object], problems: Iterator[tuple[str, Callable[[str], Problem]]]
) -> Iterator[Case]:
    def run(problem: Callable[[str], Problem], device: str) -> None:
        with assuming_l2_bytes(0):  # as few heads at once as possible
            check(problem(device), device)

    return (Case(name, partial(run, problem)) for name, problem in problems)


def _attention_cast(key: PlainKey) -> Iterator[Case]:
    channels, shifted = key[1][-1], _shift(key)

    def check(rows: int, heads: int, device: str) -> None:
        x = attention.drawn((2, rows), heads, channels, 0, dtype=key[0], shifted=shifted)
        attention.check_cast(x, device)

    yield Case("small", partial(check, 128, 1))
    yield Case("ragged", partial(check, 200, 2))
    yield Case("waves", lambda device: check(300, _waves(device) // 6 + 1, device))


CASES: dict[str, Callable[..., Iterator[Case]]] = {
    "quantize": _quantize,
    "quantize_experts": _quantize,
    "quantize_columns": _quantize_columns,
    "observe": _observe,
    "transpose": _transpose,
    "update_scales": _update_scales,
    "activation": _activation,
    "activation_backward": _activation_backward,
    "gated": partial(_gated, gated_quantize_op),
    "gated_backward": partial(_gated, gated_backward_quantize_op),
    "norm": _norm,
    "rms_norm": _rms_norm,
    "norm_backward": _norm_backward,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention_forward": _attention_forward,
    "attention_backward": _attention_backward,
    "attention_forward_of_codes": _attention_forward_of_codes,
    "attention_cast": _attention_cast,
}
"""By the name of the plan (:func:`lightning_fp8.ops.plans.planned`); called with the rest of its key."""
