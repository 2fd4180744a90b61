"""Common parts of the forward pass's blocks on Hopper: shared memory, turns, and the unit of the sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cuda_kernels.attention.block import TILE, per_stage, placed
from cuda_kernels.attention.spec import AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES
from cuda_kernels.device.language import device

TURN = 2
"""The first of two named barriers, one for each warpgroup's turn."""
ONE = np.float32(1)
_STAGES = {64: 4, 96: 3, 128: 3, 256: 2}
_LEAST_UNIT, _LARGEST_UNIT = np.float32(2.0**-24), np.float32(2.0**24)


class ForwardTiles(NamedTuple):
    """How a block processes the keys.

    Attributes:
        consume: a device function ``(smem, tile, wg_idx, scale_inv_q, scale_inv_k, scale_inv_v, left, right, c) ->
            sums, unit, softmax_state``: this thread's sums, their unit, and the softmax's state. ``scale_inv``:
            addresses of the scales of the block's queries, and of the sequence's first keys.
        store: a device function ``(sums, s, t, i, j, shared, out, tile, head, warp, strides)``, as made by
            :func:`cuda_kernels.attention.stores.make_result_store`.
    """

    consume: Any
    store: Any


def forward_stages(spec: AttentionSpec) -> int:
    """Number of stages of the ring of keys and values."""
    return _STAGES[spec.head_dim]


def forward_offsets(spec: AttentionSpec) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the total size."""
    stages = forward_stages(spec)
    ring = per_stage(stages, k=spec.panels * TILE, v=spec.head_dim * 128)
    barriers = per_stage(stages, full_k=8, full_v=8, empty_k=8, empty_v=8)
    return placed(q=spec.panels * TILE, **ring, out=8 * WARP_BYTES, full_q=8, **barriers)


@device
def can_be_unit(value_scale_inv):
    """Whether a scale of V can be the unit of the sums: near 1, so that their range is the specification's."""
    return _LEAST_UNIT <= value_scale_inv <= _LARGEST_UNIT
