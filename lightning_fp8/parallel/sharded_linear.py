"""A linear layer whose weight is a DTensor, as made by ``parallelize_module``; its placements select the mode.

| weight ``[N, K]`` | x | y |
|---|---|---|
| ``Shard(0)``: column | ``Replicate()`` | ``Shard(-1)`` |
| | ``Shard(dim)`` of the sequence, gathered in FP8 | ``Shard(-1)`` |
| ``Shard(1)``: row | ``Shard(-1)`` | ``Partial()`` |
| | | ``output_layout``, whose gradient is gathered in FP8 |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from lightning_fp8.functions.product import Product
from lightning_fp8.parallel.function import Parallel, parallel_linear


@torch.compiler.disable(reason="a linear layer in FP8 that is cut over ranks")
def sharded_linear(
    x: Tensor, weight: Any, bias: Any, product: Product, dtype: torch.dtype, output_layout: Any = None
) -> Tensor:
    """``x wᵀ + bias`` as a DTensor on the weight's mesh.

    Args:
        x: ``[..., K]``, a DTensor, or a tensor that is equal on all ranks.
        weight: DTensor ``[N, K]`` on a one-dimensional mesh.
        bias: DTensor ``[N]``, or None.
        product: casts the tensors.
        dtype: the dtype of the result.
        output_layout: the placement of y in row mode; if None, y is ``Partial()``.

    Raises:
        TypeError: If the weight's placement is not supported.
        ValueError: If x is on another mesh, if its features are sharded differently than the weight's, or if its
            sequence is not divisible by the number of ranks.
    """
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or not (placements[0].is_shard(0) or placements[0].is_shard(1)):
        raise TypeError(
            f"a Linear's weight of placements {tuple(placements)} is not supported in FP8; use Shard(0) or Shard(1) on "
            "a mesh of one dimension, as ColwiseParallel and RowwiseParallel do, or leave the layer in high precision: "
            "FP8Precision(skip=[...]) or convert_module(skip=[...])"
        )
    if isinstance(x, DTensor) and x.device_mesh != mesh:
        raise ValueError(
            f"a Linear's input is on the mesh {x.device_mesh} and its weight on {mesh}; redistribute the input to the "
            "weight's mesh"
        )
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    last = x.dim() - 1
    is_column = placements[0].is_shard(0)
    sequence = None
    if is_column:
        place: Any = x.placements[0]
        if place.is_shard() and place.dim != last:
            sequence = place.dim
        elif not place.is_replicate():
            x = x.redistribute(placements=[Replicate()])
        parallel = Parallel("column", mesh.get_group(), sequence, sums=False)
        # The gradient of a whole x stays Partial: if several layers read x, it is summed once.
        local_x = x.to_local(grad_placements=x.placements if sequence is not None else [Partial()])
        made: Any = Shard(last)
    else:
        x = x.redistribute(placements=[Shard(last)])
        if output_layout is not None and output_layout.is_shard() and output_layout.dim % x.dim() != last:
            sequence = output_layout.dim % x.dim()
        sums = output_layout is not None
        parallel = Parallel("row", mesh.get_group(), sequence, sums=sums)
        local_x = x.to_local()
        made = Shard(sequence) if sequence is not None else Replicate() if sums else Partial()
    if sequence is not None and x.shape[sequence] % mesh.size():
        raise ValueError(
            f"a sequence of {x.shape[sequence]} does not divide into {mesh.size()} pieces, one for each rank; pad it "
            "to a multiple"
        )
    local_weight = weight.to_local()
    if local_x.shape[-1] != local_weight.shape[1]:
        raise ValueError(
            f"a Linear's input has {local_x.shape[-1]} features on this rank and its weight {local_weight.shape[1]}; "
            "shard both in the same way"
        )
    local_bias = None if bias is None else bias.to_local() if isinstance(bias, DTensor) else bias
    y = parallel_linear(local_x, local_weight, local_bias, product, dtype, parallel)
    shape = torch.Size((*x.shape[:-1], weight.shape[0]))
    return DTensor.from_local(
        y, mesh, [made], run_check=False, shape=shape, stride=torch._prims_common.make_contiguous_strides_for(shape)
    )
