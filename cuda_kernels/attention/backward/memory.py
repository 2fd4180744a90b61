"""Shared-memory layouts of attention's backward kernels, and how often sums are flushed from registers."""

from __future__ import annotations

from cuda_kernels.attention.backward.statistics import CORRECTED, STATISTICS
from cuda_kernels.attention.block import TILE, per_stage, placed
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES
from cuda_kernels.kernel import SHARED_BYTES

QUERIES = 64
"""Queries of a tile for dK and dV; a stage has two tiles."""
FLUSH = 1024
"""Queries whose products the tensor cores accumulate for dK and dV before they are added in float32."""
LINE = 4 * ROWS
"""Bytes of one statistic of a stage."""
STATISTICS_BYTES = (STATISTICS - CORRECTED) * LINE
"""Bytes of the statistics of a stage."""

_OWN = 2 * TILE + 8 * WARP_BYTES + 256
"""Bytes besides the stages: two tiles of the block's own rows, buffers for results, and barriers."""


def dq_stages(spec: AttentionSpec) -> int:
    """Stages of the ring of keys: K, V and transposed K of 128 keys. One is released after the next is used."""
    stages = min(4, (SHARED_BYTES["90a"] - _OWN) // (2 * TILE + spec.head_dim * 128))
    assert stages > 1
    return stages


def dq_offsets(spec: AttentionSpec) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the total size."""
    stages = dq_stages(spec)
    ring = per_stage(stages, k=TILE, v=TILE, kt=spec.head_dim * 128)
    return placed(q=TILE, do=TILE, **ring, out=8 * WARP_BYTES, full_q=8, **per_stage(stages, full=8, empty=8))


def dkv_stages(spec: AttentionSpec) -> int:
    """Stages of the ring of queries: Q and dO of 128 queries, both also transposed, and statistics."""
    return min(4, (SHARED_BYTES["90a"] - _OWN) // (2 * TILE + 2 * spec.head_dim * 128 + STATISTICS_BYTES))


def dkv_offsets(spec: AttentionSpec) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the total size."""
    stages, transposed_bytes = dkv_stages(spec), spec.head_dim * 128
    ring = per_stage(stages, q=TILE, do=TILE, qt=transposed_bytes, dot=transposed_bytes)
    statistics = stages * STATISTICS_BYTES
    barriers = per_stage(stages, full=8, empty=8, full_qt=8, empty_qt=8)
    return placed(k=TILE, v=TILE, **ring, out=8 * WARP_BYTES, statistics=statistics, full_kv=8, **barriers)


WIDE_TILE = 2 * TILE
"""Bytes of a stage in the ring of the wide kernels: 128 rows of 256 channels, or 256 channels of 128 rows."""
WIDE_STAGES = 4


def wide_dq_offsets() -> dict[str, int]:
    """:func:`dq_offsets` for 256 channels: K, V and transposed K share the ring's stages."""
    barriers = per_stage(WIDE_STAGES, full=16, empty=8)
    return placed(q=WIDE_TILE, do=WIDE_TILE, ring=WIDE_STAGES * WIDE_TILE, out=8 * WARP_BYTES, full_q=8, **barriers)


def wide_dkv_offsets() -> dict[str, int]:
    """:func:`dkv_offsets` for 256 channels: Q, dO and a transposed copy share the ring's stages."""
    statistics, barriers = WIDE_STAGES * STATISTICS_BYTES, per_stage(WIDE_STAGES, full=8, empty=8)
    own, ring = {"k": WIDE_TILE, "v": WIDE_TILE}, WIDE_STAGES * WIDE_TILE
    return placed(**own, ring=ring, out=8 * WARP_BYTES, statistics=statistics, full_kv=8, **barriers)


def scratch_floats(spec: AttentionSpec) -> int:
    """Float32 in global memory per block for dK and dV, if any block may process more than ``FLUSH`` queries."""
    return 2 * ROWS * spec.head_dim
