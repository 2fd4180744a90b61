"""What the two backward kernels of attention have in common, and where their buffers lie in shared memory."""

from __future__ import annotations

from cuda_kernels.attention.backward.statistics import CORRECTED, STATISTICS
from cuda_kernels.attention.spec import ROWS, AttentionSpec
from cuda_kernels.attention.stores import WARP_BYTES

THREADS = 384
"""Of a block: two warpgroups multiply, a third one copies."""
MULTIPLYING = 256
PRODUCER_REGISTERS = 24
REGISTERS = 240
TILE = ROWS * 128
"""Bytes of 128 rows, 128 bytes of each; channels beyond head_dim are 0."""
QUERIES = 64
"""Queries of a tile for dK and dV; a stage has two tiles."""
FLUSH = 1024
"""Queries whose products the tensor cores accumulate for dK and dV before they are added up in float32."""
LINE = 4 * ROWS
"""Bytes of one statistic of a stage."""
STATISTICS_BYTES = (STATISTICS - CORRECTED) * LINE
"""Of a stage."""

_SHARED_BYTES = 227 * 1024
"""The most a block may have."""
_OWN = 2 * TILE + 8 * WARP_BYTES + 128
"""Of what is no stage: two tiles of the block's own rows, what leaves, and barriers."""


def dq_stages(spec: AttentionSpec) -> int:
    """Stages of the ring of keys: K, V and transposed K of 128."""
    return min(4, (_SHARED_BYTES - _OWN) // (2 * TILE + spec.head_dim * 128))


def dq_offsets(spec: AttentionSpec) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the size of all."""
    stages = dq_stages(spec)
    return _placed(
        q=TILE,
        do=TILE,
        k=stages * TILE,
        v=stages * TILE,
        kt=stages * spec.head_dim * 128,
        out=8 * WARP_BYTES,
        full_q=8,
        full=8 * stages,
        empty=8 * stages,
    )


def dkv_stages(spec: AttentionSpec) -> int:
    """Stages of the ring of queries: Q and dO of 128, both transposed too, and statistics."""
    return min(4, (_SHARED_BYTES - _OWN) // (2 * TILE + 2 * spec.head_dim * 128 + STATISTICS_BYTES))


def dkv_offsets(spec: AttentionSpec) -> dict[str, int]:
    """Byte offsets of a block's shared-memory buffers by name; ``end`` is the size of all."""
    stages = dkv_stages(spec)
    return _placed(
        k=TILE,
        v=TILE,
        q=stages * TILE,
        do=stages * TILE,
        qt=stages * spec.head_dim * 128,
        dot=stages * spec.head_dim * 128,
        out=8 * WARP_BYTES,
        statistics=stages * STATISTICS_BYTES,
        full_kv=8,
        full=8 * stages,
        empty=8 * stages,
    )


def _placed(**sizes: int) -> dict[str, int]:
    """One after the other."""
    offsets: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        offsets[name], end = end, end + size
    return {**offsets, "end": end}


def scratch_floats(spec: AttentionSpec) -> int:
    """float32 zeros in global memory that each block for dK and dV needs, if any visits more than ``FLUSH`` queries."""
    return 2 * ROWS * spec.head_dim
