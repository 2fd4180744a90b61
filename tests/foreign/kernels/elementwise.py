"""Casts, scans, reductions and atomics: one block, or some."""

import triton
import triton.language as tl


@triton.jit
def cast(x, y, n, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + where, where < n)
    tl.store(y + where, values.to(y.dtype.element_ty, fp_downcast_rounding=ROUNDING), where < n)


@triton.jit
def row_statistics(x, total, largest, place, columns, BLOCK: tl.constexpr):
    """Sum, maximum and the place of the maximum of each row."""
    row = tl.program_id(0)
    inner = tl.arange(0, BLOCK)
    values = tl.load(x + row * columns + inner, inner < columns, 0)
    tl.store(total + row, tl.sum(values, 0))
    tl.store(largest + row, tl.max(values, 0))
    tl.store(place + row, tl.argmax(values, 0))


@triton.jit
def bit_statistics(x, both, either, odd, BLOCK: tl.constexpr):
    """and, or and xor of all elements of a row."""
    row = tl.program_id(0)
    values = tl.load(x + row * BLOCK + tl.arange(0, BLOCK))
    tl.store(both + row, tl.reduce(values, 0, _and))
    tl.store(either + row, tl.reduce(values, 0, _or))
    tl.store(odd + row, tl.xor_sum(values, 0))


@triton.jit
def _and(a, b):
    return a & b


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def running(x, sums, ordered, BLOCK: tl.constexpr):
    """Prefix sums, and the sorted row."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row)
    tl.store(sums + row, tl.cumsum(values, 0))
    tl.store(ordered + row, tl.sort(values))


@triton.jit
def transpose(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Through shared memory."""
    r, c = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(x + r[:, None] * COLUMNS + c[None, :])
    tl.store(y + c[:, None] * ROWS + r[None, :], tile.T)


@triton.jit
def layer_norm(x, weight, bias, y, columns, epsilon, BLOCK: tl.constexpr):
    row, inner = tl.program_id(0), tl.arange(0, BLOCK)
    inside = inner < columns
    values = tl.load(x + row * columns + inner, inside, 0.0).to(tl.float32)
    mean = tl.sum(values, 0) / columns
    centered = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, 0) / columns + epsilon)
    result = centered * scale * tl.load(weight + inner, inside) + tl.load(bias + inner, inside)
    tl.store(y + row * columns + inner, result.to(y.dtype.element_ty), inside)


@triton.jit
def quantize_rows(x, codes, scales, columns, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """Each row by its own scale, which is a power of two: the exponent is cut from the bits."""
    row, inner = tl.program_id(0), tl.arange(0, BLOCK)
    inside = inner < columns
    values = tl.load(x + row * columns + inner, inside, 0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), 0)
    exact = LARGEST / tl.where(largest > 0, largest, LARGEST)
    scale = (exact.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scaled = tl.clamp(values * scale, -LARGEST, LARGEST)
    tl.store(codes + row * columns + inner, scaled.to(codes.dtype.element_ty), inside)
    tl.store(scales + row, 1.0 / scale)


@triton.jit
def histogram(x, counts, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = where < n
    tl.atomic_add(counts + tl.load(x + where, inside, 0), 1, inside)


@triton.jit
def collect(x, sums, least, most, bits, last, n, BLOCK: tl.constexpr):
    """One atomic of each kind."""
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = where < n
    values = tl.load(x + where, inside, 0)
    place = where % 8
    tl.atomic_add(sums + place, values.to(tl.float32), inside, sem="relaxed")
    tl.atomic_min(least + place, values, inside)
    tl.atomic_max(most + place, values, inside)
    tl.atomic_or(bits + place, values, inside)
    tl.atomic_xor(bits + 8 + place, values, inside)
    tl.atomic_and(bits + 16 + place, values, inside)
    tl.atomic_xchg(last + place, 1, inside)


@triton.jit
def locked_sum(x, total, lock, BLOCK: tl.constexpr):
    """Blocks add to one row, each while it holds the lock."""
    inner = tl.arange(0, BLOCK)
    values = tl.load(x + tl.program_id(0) * BLOCK + inner)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + inner, tl.load(total + inner) + values)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def gelu(x, gate, y, n, BLOCK: tl.constexpr):
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, g = tl.load(x + where, where < n).to(tl.float32), tl.load(gate + where, where < n).to(tl.float32)
    result = value * 0.5 * (1 + tl.erf(value * 0.7071067811865476)) * tl.sigmoid(g)
    tl.store(y + where, result.to(y.dtype.element_ty), where < n)


@triton.jit
def wide_integers(x, y, results, BLOCK: tl.constexpr):
    """64-bit arithmetic and comparisons, signed and unsigned: a row of results for each."""
    where = tl.arange(0, BLOCK)
    a, b = tl.load(x + where), tl.load(y + where)
    ua, ub = a.to(tl.uint64, bitcast=True), b.to(tl.uint64, bitcast=True)
    tl.store(results + where, a - b)
    tl.store(results + BLOCK + where, tl.minimum(a, b))
    tl.store(results + 2 * BLOCK + where, tl.maximum(a, b))
    tl.store(results + 3 * BLOCK + where, tl.minimum(ua, ub).to(tl.int64, bitcast=True))
    tl.store(results + 4 * BLOCK + where, tl.where(a <= b, a & b, a ^ b))
    tl.store(results + 5 * BLOCK + where, tl.where(ua > ub, -a, ~b))
    tl.store(results + 6 * BLOCK + where, tl.where((a == b) | (ua < ub), a >> (b & 63), a << (b & 63)))
    tl.store(results + 7 * BLOCK + where, tl.where(a >= b, a, b) * b)
    tl.store(results + 8 * BLOCK + where, a // tl.where(b == 0, 1, b))


@triton.jit
def narrow_integers(x, y, results, BLOCK: tl.constexpr):
    """32-bit division and comparisons."""
    where = tl.arange(0, BLOCK)
    a, b = tl.load(x + where), tl.load(y + where)
    ua, ub = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    divisor = tl.where(b == 0, 7, b)
    tl.store(results + where, a // divisor)
    tl.store(results + BLOCK + where, a % divisor)
    tl.store(results + 2 * BLOCK + where, tl.maximum(ua, ub).to(tl.int32, bitcast=True))
    tl.store(results + 3 * BLOCK + where, tl.where(ua <= ub, a, b))
    tl.store(results + 4 * BLOCK + where, tl.umulhi(ua, ub).to(tl.int32, bitcast=True))


@triton.jit
def floats(x, y, results, BLOCK: tl.constexpr):
    """Rounded division, roots and comparisons of float32, with what a NaN makes of them."""
    where = tl.arange(0, BLOCK)
    a, b = tl.load(x + where), tl.load(y + where)
    tl.store(results + where, tl.div_rn(a, b))
    tl.store(results + BLOCK + where, tl.sqrt_rn(a))
    tl.store(results + 2 * BLOCK + where, tl.minimum(a, b))
    tl.store(results + 3 * BLOCK + where, tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL))
    tl.store(results + 4 * BLOCK + where, tl.where(a < b, 1.0, 2.0))
    tl.store(results + 5 * BLOCK + where, tl.where(a <= b, a, b))
    tl.store(results + 6 * BLOCK + where, tl.where(a != b, 3.0, 4.0))
    tl.store(results + 7 * BLOCK + where, tl.where(a >= b, tl.abs(a), -b))
    tl.store(results + 8 * BLOCK + where, tl.fma(a, b, a))
    tl.store(results + 9 * BLOCK + where, tl.where(a == a, 5.0, 6.0))
    tl.store(results + 10 * BLOCK + where, tl.where(~(a > b), a, 7.0))
    tl.store(results + 11 * BLOCK + where, tl.where(~(a < b), b, 8.0))


@triton.jit
def integer_reductions(x, total, largest, least, BLOCK: tl.constexpr):
    """Unsigned and signed reductions of a row."""
    row = tl.program_id(0)
    values = tl.load(x + row * BLOCK + tl.arange(0, BLOCK))
    unsigned = values.to(tl.uint32, bitcast=True)
    tl.store(total + row, tl.sum(unsigned, 0).to(tl.int32, bitcast=True))
    tl.store(largest + row, tl.max(unsigned, 0).to(tl.int32, bitcast=True))
    tl.store(least + row, tl.min(values, 0))


@triton.jit
def count_bits(x, total, largest, n, BLOCK: tl.constexpr):
    """64-bit and unsigned atomics whose result nobody reads."""
    where = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + where, where < n, 0)
    tl.atomic_add(total + where % 4, values.to(tl.int64), where < n, sem="relaxed")
    tl.atomic_max(largest.to(tl.pointer_type(tl.uint32)) + where % 4, values.to(tl.uint32), where < n, sem="relaxed")


@triton.jit
def comparisons(x, y, results, BLOCK: tl.constexpr):
    """Each comparison of 64-bit integers, signed and unsigned."""
    where = tl.arange(0, BLOCK)
    a, b = tl.load(x + where), tl.load(y + where)
    ua, ub = a.to(tl.uint64, bitcast=True), b.to(tl.uint64, bitcast=True)
    tl.store(results + where, tl.where(a == b, 3, where))
    tl.store(results + BLOCK + where, tl.where(a != b, 5, where))
    tl.store(results + 2 * BLOCK + where, tl.where(a < b, 7, where))
    tl.store(results + 3 * BLOCK + where, tl.where(a <= b, 11, where))
    tl.store(results + 4 * BLOCK + where, tl.where(a > b, 13, where))
    tl.store(results + 5 * BLOCK + where, tl.where(a >= b, 17, where))
    tl.store(results + 6 * BLOCK + where, tl.where(ua < ub, 19, where))
    tl.store(results + 7 * BLOCK + where, tl.where(ua <= ub, 23, where))


@triton.jit
def scalars(x, bf16, fp16, remainder, n, wide):
    """One number for a block, as Triton's scalars are."""
    row = tl.program_id(0)
    value = tl.load(x + row)
    tl.store(bf16 + row, value.to(tl.bfloat16))
    tl.store(fp16 + row, value.to(tl.float16))
    tl.store(remainder + row, (row - 2) * 1001 % n)
    tl.store(x + row, tl.load(wide + row).to(tl.float32))
