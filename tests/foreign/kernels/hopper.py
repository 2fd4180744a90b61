"""C = A Bᵀ of [M, K] and [N, K] in Gluon, where barriers, copies, warps and clusters are the writer's."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _load(a, b, c, full, empty, left, right, K):
    """The copying warp: fills one place after another as soon as it is free."""
    stages: gl.constexpr = full.shape[0]
    inner: gl.constexpr = a.block_type.shape[1]
    row, column = gl.program_id(0) * a.block_type.shape[0], gl.program_id(1) * b.block_type.shape[0]
    for step in range(gl.cdiv(K, inner)):
        stage, lap = step % stages, step // stages
        mbarrier.wait(empty.index(stage), (lap & 1) ^ 1)
        mbarrier.expect(full.index(stage), a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [row, step * inner], full.index(stage), left.index(stage))
        tma.async_load(b, [column, step * inner], full.index(stage), right.index(stage))


@gluon.jit
def _multiply(a, b, c, full, empty, left, right, K):
    """The multiplying warpgroups; the result leaves through shared memory."""
    stages: gl.constexpr = full.shape[0]
    rows: gl.constexpr = c.block_type.shape[0]
    columns: gl.constexpr = c.block_type.shape[1]
    inner: gl.constexpr = a.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [gl.num_warps(), 1], [16, columns, 256 // a.dtype.primitive_bitwidth]
    )
    sums = gl.zeros((rows, columns), gl.float32, layout)
    for step in range(gl.cdiv(K, inner)):
        stage, lap = step % stages, step // stages
        mbarrier.wait(full.index(stage), lap & 1)
        sums = warpgroup_mma(left.index(stage), right.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(empty.index(stage), count=1)
    place = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    place.store(sums.to(c.dtype))
    fence_async_shared()
    tma.async_store(c, [gl.program_id(0) * rows, gl.program_id(1) * columns], place)
    tma.store_wait(0)


@gluon.jit
def specialized(a, b, c, K, STAGES: gl.constexpr):
    """One warp copies with few registers, all others multiply with what it gave away."""
    left = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    args = (a, b, c, full, empty, left, right, K)
    gl.warp_specialize([(_multiply, args), (_load, args)], [1], [40])


@gluon.jit
def multicast(a, b, c, K, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, LAYOUT: gl.constexpr):
    """Two blocks of a cluster share the columns of B: each copies half of them to both."""
    left = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    right = gl.allocate_shared_memory(b.dtype, b.block_type.shape, b.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    gl.barrier(cluster=True)
    row, column = gl.program_id(0) * BM, gl.program_id(1) * BN
    sums = gl.zeros((BM, BN), gl.float32, LAYOUT)
    for step in range(gl.cdiv(K, BK)):
        mbarrier.expect(full, a.nbytes_per_cta + b.nbytes_per_cta)
        tma.async_load(a, [row, step * BK], full, left, multicast=True)
        tma.async_load(b, [column, step * BK], full, right, multicast=True)
        mbarrier.wait(full, step & 1)
        sums = warpgroup_mma(left, right.permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        gl.barrier(cluster=True)
    mbarrier.invalidate(full)
    place = gl.allocate_shared_memory(c.dtype, c.block_type.shape, c.layout)
    place.store(sums.to(c.dtype))
    fence_async_shared()
    tma.async_store(c, [row, column], place)
    tma.store_wait(0)


@gluon.jit
def add_tiles(a, c, BM: gl.constexpr):
    """Copies a tile in and adds it in global memory."""
    tile = gl.allocate_shared_memory(a.dtype, a.block_type.shape, a.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    row = gl.program_id(0) * BM
    mbarrier.expect(full, a.nbytes_per_cta)
    tma.async_load(a, [row, 0], full, tile)
    mbarrier.wait(full, 0)
    tma.async_atomic_add(c, [0, 0], tile)
    tma.store_wait(0)
