"""The transpose of FP8 codes on CUDA tensors, in one launch, or one for each expert.

torch transposes codes without contiguous rows, and those of experts whose transposed rows are not aligned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cuda_kernels.casts.transpose import transpose_kernel
from cuda_kernels.device.tile import num_tiles
from cuda_kernels.host import launch
from lightning_fp8.numerics.scaled import Layout
from lightning_fp8.ops.memory import ALIGNMENT, PlainKey, TensorKey, maker, operand_allocations, tensor_key
from lightning_fp8.ops.plans import check_not_empty, current_device, planned
from lightning_fp8.ops.transpose import reference_transpose, transpose_op


def transpose_on_cuda(codes: Tensor) -> Tensor:
    """Transpose in one launch; ``codes [E, R, C]`` in E of them."""
    if codes.dim() == 3:
        out = codes.new_empty(codes.shape[0], codes.shape[2], codes.shape[1])
        if codes.shape[1] % ALIGNMENT:
            return reference_transpose(codes, out)
        for each, place in zip(codes, out):
            _plan(each.device, each.is_cuda and current_device(), tensor_key(each))(each, place)
        return out
    return _plan(codes.device, codes.is_cuda and current_device(), tensor_key(codes))(codes)  # type: ignore[no-any-return]


@planned(fallback=reference_transpose, name="transpose")
def _plan(device: torch.device, codes_plain_key: PlainKey) -> Callable[..., Tensor]:
    key = TensorKey(*codes_plain_key, device)
    check_not_empty(key.shape)
    if not key.has_contiguous_rows:
        return reference_transpose
    rows, columns = key.rows, key.columns
    of_out, _ = operand_allocations(Layout.TENSOR, key.dtype, columns, rows)
    run = launch.bind(
        transpose_kernel(4 if key.is_vectorizable(4) else 1),
        num_tiles(rows, columns),
        device,
        ("codes", "stride", "out"),
        rows=rows,
        columns=columns,
        out_stride=of_out.strides[0],
    )
    pointer, new, stride = launch.address_on(device), maker(device, of_out), key.stride

    def transpose(codes: Tensor, out: Tensor | None = None) -> Tensor:
        out = new() if out is None else out
        run(pointer(codes), stride, pointer(out))
        return out

    return transpose


transpose_op.implement("cuda", transpose_on_cuda)
