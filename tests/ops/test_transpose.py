"""Transposed codes, and casts by given scales of columns: against float64 and torch's own transpose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_fp8 import ops
from lightning_fp8.numerics.formats import E4M3, E5M2, Float8
from lightning_fp8.numerics.scaled import Cast, Layout, ScaledTensor
from lightning_fp8.ops.cast import kernel_allocations
from lightning_fp8.ops.memory import code_allocation, operand_allocations
from lightning_fp8.proofs.drawing import every_code
from lightning_fp8.weights.fp8_tensor import transposed
from tests.float8_reference import cast

FORMATS = pytest.mark.parametrize("float8", [E4M3, E5M2], ids=lambda each: each.name)


def bytes_of(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8)


@FORMATS
@pytest.mark.parametrize("shape", [(5, 48), (33, 7), (1, 1), (0, 3), (3, 0), (3, 5, 48), (2, 33, 7)])
def test_every_code_is_moved(shape: tuple[int, ...], float8: Float8) -> None:
    codes = every_code(math.prod(shape[:-1]), shape[-1], float8.dtype).view(shape)
    result = ops.transpose(codes)
    assert torch.equal(bytes_of(result), bytes_of(codes).mT)
    assert result.is_contiguous()
    assert torch.equal(bytes_of(ops.transpose(codes.mT)), bytes_of(codes))


@FORMATS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_column_has_its_scale(dtype: torch.dtype, float8: Float8) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, 24, generator=generator) * 8).to(dtype)
    scale = torch.exp2(torch.linspace(-14, 14, 24)) * 1.3
    codes = ops.quantize_columns(x, scale, float8)
    assert codes.dtype == float8.dtype
    for column in range(24):
        expected = cast(x[:, column].float().numpy(), float(scale[column]), float8.name)
        assert np.array_equal(bytes_of(codes)[:, column].numpy(), expected)
    assert torch.equal(bytes_of(ops.quantize_columns(x.t().contiguous().t(), scale, float8)), bytes_of(codes))


def test_shards_give_the_operand_of_the_whole_transpose() -> None:
    """What is gathered of two shards' codes, transposed, is the whole tensor's columnwise operand."""
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    whole = ops.quantize(x, Cast(E4M3, Layout.ROW, power_2_scale=True), rowwise=False, columnwise=True).columnwise
    assert whole is not None
    scale = 1 / whole.scale_inv.flatten()
    gathered = torch.cat([bytes_of(ops.quantize_columns(shard, scale, E4M3)) for shard in (x[:40], x[40:])])
    assert torch.equal(bytes_of(ops.transpose(gathered.view(E4M3.dtype))), bytes_of(whole.data))


def test_special_values() -> None:
    x = torch.tensor([[torch.nan, torch.inf, -torch.inf, 1.0, 0.0, 1e30]])
    scale = torch.tensor([1.0, 1.0, 1.0, torch.nan, torch.inf, 1e30])
    values = ops.quantize_columns(x, scale, E4M3).float()[0]
    assert values.isnan().tolist() == [True, False, False, True, True, False]
    assert values[[1, 2, 5]].tolist() == [448.0, -448.0, 448.0]


def test_ops_pass_torchs_own_checks() -> None:
    library = torch.ops.lightning_fp8
    x, scale, codes = torch.randn(6, 10), torch.rand(10), torch.randn(6, 10).to(E4M3.dtype)
    torch.library.opcheck(library.quantize_columns, (x, scale, E4M3.dtype))
    # The schema check multiplies its inputs by numbers, which torch cannot do with FP8.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(library.transpose, (codes,), test_utils=checks)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(dynamic: bool) -> None:
    def both(x: Tensor, scale: Tensor) -> Tensor:
        return ops.transpose(ops.quantize_columns(x * 2, scale, E4M3))

    x, scale = torch.randn(6, 10), torch.rand(10) * 100
    compiled = torch.compile(both, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(bytes_of(compiled(x, scale)), bytes_of(both(x, scale)))


def test_a_cards_codes_are_allocated_as_an_operands() -> None:
    allocation = code_allocation(torch.device("cuda"), E4M3.dtype, 70, 100)
    assert allocation == operand_allocations(Layout.TENSOR, E4M3.dtype, 70, 100)[0]
    assert allocation.strides == (112, 1)


def test_the_transposed_operand_of_a_card_is_a_copy() -> None:
    """A view of other strides is no operand of a product there."""
    with FakeTensorMode():
        codes, scale_inv = torch.empty(320, 208, device="cuda", dtype=E4M3.dtype), torch.empty((), device="cuda")
        other = transposed(ScaledTensor(codes, scale_inv, Layout.TENSOR))
    assert other.data.shape == (208, 320)
    assert other.data.stride() == (320, 1)
    assert other.scale_inv.shape == ()


@pytest.mark.parametrize("rows", [320, 200])
def test_transposed_experts_have_the_memory_of_their_cast(rows: int) -> None:
    """On a card: rows begin at multiples of 16 bytes, and all experts are one matrix for the product."""
    cast = Cast(E4M3, Layout.BLOCK_128X128, rowwise=False, columnwise=True)
    *_, of_cast, _ = kernel_allocations(cast, rows, 144, 3)
    made = code_allocation(torch.device("cuda"), E4M3.dtype, 144, rows).stacked(3)
    assert made == of_cast
    assert made.strides == (144 * -(-rows // 16) * 16, -(-rows // 16) * 16, 1)
