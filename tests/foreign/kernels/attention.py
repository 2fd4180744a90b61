"""Attention, the softmax on line: P goes from one product to the next in registers."""

import triton
import triton.language as tl


@triton.jit
def attention(q, k, v, out, length, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr):
    """softmax(Q Kᵀ) V in base 2, unscaled, for one block of rows of Q; V comes transposed, [D, length]."""
    row = tl.program_id(0) * BM
    queries = q.load([row, 0])
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, D), tl.float32)
    for start in range(0, length, BN):
        scores = tl.dot(queries, k.load([start, 0]).T)
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        correction = tl.exp2(highest - higher)
        total = total * correction + tl.sum(p, 1)
        sums = tl.dot(p.to(P), v.load([0, start]).T, sums * correction[:, None])
        highest = higher
    out.store([row, 0], (sums / total[:, None]).to(out.dtype))


@triton.jit
def pointer_attention(q, k, v, out, length, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, P: tl.constexpr):
    """The same through pointers, V as [length, D]: mma.sync on cards without wgmma."""
    rows, inner = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    queries = tl.load(q + rows[:, None] * D + inner[None, :])
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    sums = tl.zeros((BM, D), tl.float32)
    for start in range(0, length, BN):
        columns = start + tl.arange(0, BN)
        scores = tl.dot(queries, tl.load(k + columns[None, :] * D + inner[:, None]))
        higher = tl.maximum(highest, tl.max(scores, 1))
        p = tl.exp2(scores - higher[:, None])
        correction = tl.exp2(highest - higher)
        total = total * correction + tl.sum(p, 1)
        sums = tl.dot(p.to(P), tl.load(v + columns[:, None] * D + inner[None, :]), sums * correction[:, None])
        highest = higher
    tl.store(out + rows[:, None] * D + inner[None, :], sums / total[:, None])
