"""Matrix products C = A Bᵀ of [M, K] and [N, K], in Triton's ways to write them."""

import triton
import triton.language as tl


@triton.jit
def descriptor_product(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """A tile for each block; operands and result through tensor descriptors."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        sums = tl.dot(a.load([row, k]), b.load([column, k]).T, sums)
    c.store([row, column], sums.to(c.dtype))


@triton.jit
def persistent_product(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPECIALIZE: tl.constexpr
):
    """Each block takes every n-th tile."""
    columns = tl.cdiv(N, BN)
    for tile in tl.range(
        tl.program_id(0),
        tl.cdiv(M, BM) * columns,
        tl.num_programs(0),
        flatten=not SPECIALIZE,
        warp_specialize=SPECIALIZE,
    ):
        row, column = tile // columns * BM, tile % columns * BN
        sums = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            sums = tl.dot(a.load([row, k]), b.load([column, k]).T, sums)
        c.store([row, column], sums.to(c.dtype))


@triton.jit
def specialized_product(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Copies and multiplications in warps of their own."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    sums = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=True):
        sums = tl.dot(a.load([row, k]), b.load([column, k]).T, sums)
    c.store([row, column], sums.to(c.dtype))


@triton.jit
def split_product(a, b, c, K, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """K is cut into parts, whose blocks add to one result."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.program_id(2) * BK, K, PARTS * BK):
        sums = tl.dot(a.load([row, k]), b.load([column, k]).T, sums)
    c.atomic_add([row, column], sums)


@triton.jit
def pointer_product(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):
    """Operands through pointers, masked at the edges: cp.async on cards that have no tensor memory accelerator."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    sums = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        place, inside = k + inner, k + inner < K
        left = tl.load(a + rows[:, None] * K + place[None, :], (rows < M)[:, None] & inside[None, :], 0.0)
        right = tl.load(b + columns[None, :] * K + place[:, None], (columns < N)[None, :] & inside[:, None], 0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    where = rows[:, None] * N + columns[None, :]
    tl.store(c + where, sums.to(c.dtype.element_ty), (rows < M)[:, None] & (columns < N)[None, :])
