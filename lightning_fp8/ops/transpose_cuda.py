"""The transpose of FP8 codes on CUDA tensors, in one launch. torch copies codes without contiguous rows first."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.casts.transpose import transpose_kernel
from cuda_kernels.device.tile import num_tiles
from cuda_kernels.host import launch
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops.memory import PlainKey, TensorKey, maker, operand_allocations, tensor_key
from lightning_fp8.ops.plans import check_not_empty, current_device, planned
from lightning_fp8.ops.transpose import reference_transpose, transpose_op


def transpose_on_cuda(codes: Tensor) -> Tensor:
    """Transpose in one launch, also all experts."""
    experts = len(codes) if codes.dim() == 3 else 0
    rows = codes.flatten(0, 1) if experts else codes
    plan = _plan(codes.device, codes.is_cuda and current_device(), tensor_key(rows), experts)
    return plan(rows, experts)  # type: ignore[no-any-return]


def _reference(codes: Tensor, experts: int) -> Tensor:
    return reference_transpose(codes.unflatten(0, (experts, -1)) if experts else codes)


@planned(fallback=_reference, name="transpose")
def _plan(device: torch.device, codes_plain_key: PlainKey, experts: int) -> Callable[[Tensor, int], Tensor]:
    key = TensorKey(*codes_plain_key, device)
    check_not_empty(key.shape)
    if not key.has_contiguous_rows:
        return _reference
    rows, columns = key.rows // max(experts, 1), key.columns
    of_out, _ = operand_allocations(Layout.TENSOR, key.dtype, columns, rows)
    run = launch.bind(
        transpose_kernel(4 if key.is_vectorizable(4) else 1, experts > 0),
        (num_tiles(rows, columns), 1, max(experts, 1)),
        device,
        ("codes", "stride", "out"),
        rows=rows,
        columns=columns,
        out_stride=of_out.strides[0],
    )
    pointer, new, stride = launch.address_on(device), maker(device, of_out.stacked(experts or None)), key.stride

    def transpose(codes: Tensor, _: int) -> Tensor:
        out = new()
        run(pointer(codes), stride, pointer(out))
        return out

    return transpose


transpose_op.implement("cuda", transpose_on_cuda)
