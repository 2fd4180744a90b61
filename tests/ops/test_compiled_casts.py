"""Casts that a card without their kernel runs compiled: the bits of the specification, and a way back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fp8.numerics import scaling
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import Cast, Layout
from lightning_fp8.ops import plans
from lightning_fp8.ops.cast import _quantize_to_bytes, encode
from lightning_fp8.ops.compiled import compiled, compiled_on_cards
from lightning_fp8.proofs.comparing import assert_same
from lightning_fp8.proofs.drawing import sample
from tests import float8_reference
from tests.cuda_kernels.cases.kernel_cases import BF16, FP16, FP32
from tests.tiers import thorough

FORMATS = pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda float8: float8.name)


@pytest.fixture(autouse=True)
def _unplanned() -> Iterator[None]:
    plans.clear_plan_cache()
    yield
    plans.clear_plan_cache()


# --- The arithmetic that compilers do exactly -------------------------------------------------------------------------


@FORMATS
def test_codes_by_integers_are_the_nearest(float8: Float8) -> None:
    """Of every bfloat16, what lies between each and the next, and its neighbours in float32."""
    top = torch.arange(2**16, dtype=torch.int32) << 16
    bits = torch.cat([top + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    x = bits.view(torch.float32).clamp(-float8.max, float8.max)
    codes = encode(x, float8).numpy()
    expected = float8_reference.cast(x.numpy(), 1.0, float8.name)
    is_nan = x.isnan().numpy()
    assert np.array_equal(codes[~is_nan], expected[~is_nan])
    assert set(codes[is_nan] & 0x7F) == {0x7F}


def test_scales_are_rounded_once() -> None:
    """numpy divides in float32; of denormal results, too."""
    bits = np.random.default_rng(0).integers(1, 0x7F800000, 10**6, dtype=np.int32)
    x = np.concatenate([bits, [1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF]]).astype(np.int32).view(np.float32)
    with np.errstate(over="ignore"):
        inverse, scale = np.float32(1) / x, np.minimum(np.float32(448) / x, np.finfo(np.float32).max)
    assert np.array_equal(scaling.inverse(torch.from_numpy(x)).numpy(), inverse)
    assert np.array_equal(scaling.current_scale(torch.from_numpy(x), 448.0).numpy(), scale)


# --- Compiled ---------------------------------------------------------------------------------------------------------


def hostile(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Many binades, and in places NaN, infinity, subnormal numbers, and a block of zeros."""
    x = sample(rows, columns, dtype)
    tiny = torch.finfo(dtype).smallest_normal
    x[1, :6] = torch.tensor([tiny, -tiny / 4, torch.inf, -torch.inf, torch.nan, torch.finfo(dtype).max])
    x[rows // 2 :, columns // 2 :] = 0
    x[-1] = tiny / 2
    return x


CASTS: list[tuple[Cast, str, torch.dtype]] = [
    (Cast(E4M3, Layout.TENSOR, columnwise=True, scale_is_nonzero=True), "scale amax", BF16),
    (Cast(E5M2, Layout.TENSOR, columnwise=True), "scale amax", FP16),
    (Cast(E4M3, Layout.TENSOR, amax_epsilon=1e-3), "", FP32),
    (Cast(E5M2, Layout.TENSOR, rowwise=False, columnwise=True), "", BF16),
    (Cast(E4M3, Layout.ROW, True, columnwise=True), "", BF16),
    (Cast(E5M2, Layout.ROW, columnwise=True), "", FP32),
    (Cast(E4M3, Layout.BLOCK_1X128, columnwise=True), "", FP16),
    (Cast(E5M2, Layout.BLOCK_1X128, True, 1e-3), "", BF16),
    (Cast(E4M3, Layout.BLOCK_128X128), "", FP32),
    (Cast(E5M2, Layout.BLOCK_128X128, rowwise=False, columnwise=True), "", BF16),
    (Cast(E4M3, Layout.MX_1X32, columnwise=True), "", BF16),
    (Cast(E5M2, Layout.MX_1X32, columnwise=True), "", FP32),
]
"""A cast, which optional tensors are given, and x's dtype."""


def observed(given: str, scale: float) -> list[Tensor | None]:
    tensors = {"scale": torch.tensor(scale), "amax": torch.tensor(0.5)}
    return [tensor if name in given else None for name, tensor in tensors.items()]


def check_compiled(cast: Cast, given: str, inputs: Iterable[Tensor]) -> None:
    eager: Any = _quantize_to_bytes.__wrapped__  # type: ignore[attr-defined]
    fast = compiled(eager)
    for x in inputs:
        for scale in (3.7,) if cast.scale_is_nonzero or "scale" not in given else (3.7, 0.0):
            results = []
            for run in (fast, eager):
                tensors = observed(given, scale)
                data, scale_inv, data_t, scale_inv_t = run(x, cast, *tensors)
                codes = (None if each is None else each.view(cast.float8.dtype) for each in (data, data_t))
                results.append((*codes, scale_inv, scale_inv_t, *tensors))
            for actual, expected in zip(*results):
                assert (actual is None) == (expected is None)
                if expected is not None:
                    assert_same(actual, expected, f"{cast} of {tuple(x.shape)}")


@pytest.fixture
def _compiles() -> Iterator[None]:
    """A warning would say that something runs uncompiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


@pytest.mark.usefixtures("_compiles")
@pytest.mark.parametrize(("cast", "given", "dtype"), [CASTS[0], CASTS[5]])
def test_one_graph_gives_the_specifications_bits(
    cast: Cast, given: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Inductor gets: no part of it needs Python, and nothing asks for a value."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    check_compiled(cast, given, [hostile(131, 203, dtype)])


@thorough
@pytest.mark.usefixtures("_compiles")
@pytest.mark.parametrize(("cast", "given", "dtype"), CASTS)
def test_inductor_gives_the_specifications_bits(cast: Cast, given: str, dtype: torch.dtype) -> None:
    """Of ragged rows; two layouts also of other strides and sizes, each of which Inductor compiles again."""
    x = hostile(256, 384, dtype)
    others = [x, x.t(), x[1:2, :40]] if cast.layout in (Layout.TENSOR, Layout.ROW) and cast.columnwise else []
    check_compiled(cast, given, [x[:-1, 3:], *others])


def test_what_cannot_be_compiled_runs_as_it_is_with_one_warning() -> None:
    calls: list[int] = []

    def doubled(x: Tensor, option: int) -> Tensor:
        calls.append(option)
        print(end="")  # no graph has that
        return x * option

    fast, x = compiled(doubled), torch.arange(5.0)
    with pytest.warns(RuntimeWarning, match=r"torch\.compile fails on cpu: .*uncompiled") as caught:
        assert [fast(x, option).tolist() for option in (2, 3, 2)] == [(x * option).tolist() for option in (2, 3, 2)]
    assert len(caught) == 1
    assert calls[-3:] == [2, 3, 2]


def test_passes_that_differ_in_torchs_state_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight recompilations in one function Dynamo takes no more."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    fast = compiled(lambda x, option: x * option if x.shape[0] % 2 else x + option)
    x = torch.ones(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            try:
                for state in (torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
                    with state:
                        for rows in (4, 3, 2):
                            assert fast(x[:rows], 3).unique().tolist() == [3.0 if rows % 2 else 4.0]
            finally:
                torch.set_default_dtype(torch.float32)


def test_without_a_compiler_functions_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(*args: object, **kwargs: object) -> None:
        raise RuntimeError("torch.compile is not supported on Python 4.0+")

    monkeypatch.setattr(torch, "compile", no_compiler)
    with pytest.warns(RuntimeWarning, match="not supported on Python"):
        assert compiled(lambda x: -x)(torch.ones(3)).tolist() == [-1.0] * 3


def test_errors_of_running_code_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is full is no reason to do without a compiler."""

    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    with pytest.raises(torch.OutOfMemoryError):
        compiled(full)(torch.ones(3))


def test_only_what_is_on_a_card_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: lambda x, option: ("compiled", option))
    run = compiled_on_cards(lambda x, option: ("as it is", option))
    with FakeTensorMode():
        on_card = torch.empty(3, device="cuda")
    assert run(torch.ones(3), 7) == ("as it is", 7)
    assert run(on_card, 7) == ("compiled", 7)
