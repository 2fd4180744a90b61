"""cuBLASLt called directly, on a stand-in that takes what the library takes and multiplies in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.contenders import cublaslt
from benchmarks.contenders.cublaslt import Matmul
from lightning_fp8.numerics.scaled import Layout, ScaledTensor
from lightning_fp8.proofs.drawing import numbers
from lightning_fp8.proofs.products import aligned, operand
from tests.benchmarks import cublaslt_stand_in as library
from tests.benchmarks.cublaslt_stand_in import CublasLt, Refused, stand_in
from tests.cuda_kernels.cases.gemm_cases import PAIRS
from tests.cuda_kernels.cases.kernel_cases import BF16, E4M3, E5M2, FP16, FP32

M, N, K = 48, 144, 400
"""All different; two rows of 128 × 128 blocks, and four of k, of which the last is ragged."""


def nvmath() -> Any:
    """The real package; None where it is not installed."""
    try:
        return cublaslt.bindings(torch.device("cuda"))
    except ImportError:
        return None


@pytest.fixture
def lt(monkeypatch: pytest.MonkeyPatch) -> CublasLt:
    """The stand-in, with the real package's enumerations where it is installed."""
    api = stand_in(nvmath())
    monkeypatch.setattr(cublaslt, "bindings", lambda device: api)
    made: CublasLt = api.cublasLt
    return made


def operands(
    scaling: str, formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3), k: int = K
) -> tuple[ScaledTensor, ScaledTensor]:
    """As kernels read them: rows begin at multiples of 16 bytes. No two scales need be the same."""
    made = []
    for rows, seed, dtype, layout in zip((M, N), (0, 1), formats, PAIRS[scaling]):
        generator = torch.Generator().manual_seed(seed)
        sizes = torch.randint(-3, 4, (-(-rows // 16), -(-k // 128)), generator=generator).float().exp2()
        sizes = sizes.repeat_interleave(16, 0)[:rows].repeat_interleave(128, 1)[:, :k]
        plain = operand(numbers(rows, k, seed, exact=True) * sizes, dtype, layout, power_2=True)
        made.append(ScaledTensor(*aligned(plain), plain.layout))
    return made[0], made[1]


def exact(left: ScaledTensor, right: ScaledTensor) -> Tensor:
    return left.dequantize().double() @ right.dequantize().double().t()


@pytest.mark.parametrize("out", [BF16, FP16, FP32])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize("scaling", PAIRS)
def test_every_candidate_is_the_product(
    lt: CublasLt, scaling: str, formats: tuple[torch.dtype, torch.dtype], out: torch.dtype
) -> None:
    left, right = operands(scaling, formats)
    result = torch.full((M, N), torch.nan, dtype=out)
    matmul = Matmul(left, right, result, fast=scaling == "row")
    assert len(matmul) == 2  # the third needs more memory than there is, and the fourth is none
    for candidate in range(len(matmul)):
        result.fill_(torch.nan)
        assert torch.equal(matmul(candidate), exact(left, right).to(out))
    assert lt.ran == [(0, scaling == "row"), (1, scaling == "row")]


@pytest.mark.parametrize("k", [128, 384, 512, 640])
def test_scales_of_blocks_lie_where_they_are_read(lt: CublasLt, k: int) -> None:
    """Rows of 128 × 128 blocks begin at multiples of 4 scales, whatever their number."""
    left, right = operands("block", k=k)
    matmul = Matmul(left, right, torch.empty(M, N, dtype=FP32), fast=False)
    assert torch.equal(matmul(), exact(left, right).float())


def test_what_is_there_is_added_to(lt: CublasLt) -> None:
    left, right = operands("tensor")
    before = numbers(M, N, 3, exact=True)
    result = before.clone()
    matmul = Matmul(left, right, result, fast=False, beta=1.0)
    matmul()
    matmul()
    assert torch.equal(result, (before.double() + 2 * exact(left, right)).float())


def test_operands_and_results_may_have_gaps(lt: CublasLt) -> None:
    """Leading dimensions are those of memory."""
    left, right = operands("tensor")
    wide = torch.zeros(M, K + 112, dtype=torch.uint8)
    wide[:, :K] = left.data.view(torch.uint8)
    left = ScaledTensor(wide.view(E4M3)[:, :K], left.scale_inv, left.layout)
    result = torch.zeros(M, N + 16, dtype=FP32)
    Matmul(left, right, result[:, :N], fast=True)()
    assert torch.equal(result[:, :N], exact(left, right).float())
    assert not result[:, N:].any()


def test_a_product_that_the_library_refuses_says_so(lt: CublasLt) -> None:
    left, right = operands("tensor", (E5M2, E5M2))
    with pytest.raises(Refused, match="no E5M2 by E5M2"):
        Matmul(left, right, torch.empty(M, N), fast=False)
    left, right = operands("tensor", k=408)
    with pytest.raises(Refused, match="408 are no multiples of 16"):
        Matmul(left, right, torch.empty(M, N), fast=False)
    _, right = operands("block")
    both = ScaledTensor(right.data[:128], torch.ones(1, 4), Layout.BLOCK_128X128)
    with pytest.raises(Refused, match=r"scale modes \(5, 5\)"):
        Matmul(both, both, torch.empty(128, 128), fast=False)


def test_nothing_is_asked_of_the_library_for_memory_that_it_cannot_read() -> None:
    left, right = operands("tensor")
    with pytest.raises(RuntimeError, match="needs a CUDA device"):
        Matmul(left, right, torch.empty(M, N), fast=False)


def test_no_algorithm_is_an_error(lt: CublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "WORKSPACES", (1 << 40,))
    left, right = operands("tensor")
    with pytest.raises(RuntimeError, match="return no algorithm"):
        Matmul(left, right, torch.empty(M, N), fast=False)


# --- The stand-in itself ----------------------------------------------------------------------------------------------


def test_the_numbers_are_the_real_packages() -> None:
    real = nvmath() or pytest.skip("nvmath-python is not installed")
    for mine in (library.MatmulMatrixScale, library.MatmulDescAttribute, library.MatmulPreferenceAttribute):
        theirs = getattr(real.cublasLt, mine.__name__)
        assert {each.name: int(each) for each in mine} == {each.name: int(theirs[each.name]) for each in mine}
    for mine in (library.ComputeType, library.Operation):
        theirs = getattr(real.cublas, mine.__name__)
        assert all(int(theirs[each.name]) == each for each in mine)
    types = {name: number for name, number in vars(library.cudaDataType).items() if name.startswith("CUDA_")}
    assert all(int(getattr(real.cudaDataType, name)) == number for name, number in types.items())
    assert np.dtype(real.cublasLt.matmul_heuristic_result_dtype) == library.HEURISTIC_RESULT
    for name, kind in library.SIZES.items():
        attribute = real.cublasLt.MatmulDescAttribute[name]
        assert np.dtype(real.cublasLt.get_matmul_desc_attribute_dtype(attribute)) == np.dtype(kind)
    for name, kind in library.PREFERENCES.items():
        attribute = real.cublasLt.MatmulPreferenceAttribute[name]
        assert np.dtype(real.cublasLt.get_matmul_preference_attribute_dtype(attribute)) == np.dtype(kind)


def described(lt: CublasLt, **attributes: int) -> int:
    operation = lt.matmul_desc_create(68, 0)
    for name, number in attributes.items():
        buffer = np.array([number], library.SIZES[name])
        attribute = library.MatmulDescAttribute[name]
        lt.matmul_desc_set_attribute(operation, attribute, buffer.ctypes.data, buffer.nbytes)
    return operation


@pytest.mark.parametrize(
    ("attributes", "sizes", "why"),
    [
        ({}, (N, M, K), "TN alone"),
        ({"TRANSA": 1, "TRANSB": 1}, (N, M, K), "TN alone"),
        ({"TRANSA": 1, "A_SCALE_MODE": 5, "B_SCALE_MODE": 5}, (N, M, K), "scale modes"),
        ({"TRANSA": 1, "A_SCALE_MODE": 3}, (N, M, K), "scale modes"),
        ({"TRANSA": 1, "A_SCALE_MODE": 2, "B_SCALE_MODE": 2}, (N, M, K), "scale modes"),
        ({"TRANSA": 1}, (M, N, K), "sizes do not fit"),
    ],
)
def test_the_stand_in_refuses(attributes: dict[str, int], sizes: tuple[int, int, int], why: str) -> None:
    lt = CublasLt()
    m, n, k = sizes
    a, b, d = (lt.matrix_layout_create(kind, *size) for kind, size in
               ((28, (k, m, k)), (28, (k, n, k)), (14, (N, M, N))))  # fmt: skip
    preference = lt.matmul_preference_create()
    results, count = np.zeros(4, library.HEURISTIC_RESULT), np.zeros(1, np.int32)
    places = results.ctypes.data, count.ctypes.data
    asked = lt.create(), described(lt, **attributes), a, b, d, d, preference, 4, *places
    with pytest.raises(Refused, match=why):
        lt.matmul_algo_get_heuristic(*asked)


def test_the_stand_in_refuses_layouts_and_sizes_of_attributes() -> None:
    lt = CublasLt()
    with pytest.raises(Refused, match="do not fit into a leading dimension of 128"):
        lt.matrix_layout_create(28, 256, 16, 128)
    with pytest.raises(Refused, match="not aligned"):
        lt.matrix_layout_create(28, 256, 16, 264)
    with pytest.raises(Refused, match="type 99"):
        lt.matrix_layout_create(99, 256, 16, 256)
    wide = np.array([1], np.int32)
    with pytest.raises(Refused, match="4 bytes, not 1"):
        lt.matmul_desc_set_attribute(
            lt.matmul_desc_create(68, 0), library.MatmulDescAttribute.FAST_ACCUM, wide.ctypes.data, wide.nbytes
        )
    with pytest.raises(Refused, match="computes in 32F"):
        lt.matmul_desc_create(64, 0)
