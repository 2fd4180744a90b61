"""Kernels for the tests of the emulator: a matrix product for Hopper, one for older and newer GPUs, and PTX by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from cuda.core import Linker, LinkerOptions, ObjectCode
from llvmlite import ir
from numba import cuda
from numba.cuda import types
from numba.cuda.cgutils import get_or_insert_named_metadata, pack_array, unpack_tuple
from numba.cuda.extending import core_models, register_model
from numba.cuda.typing import signature

from cuda_kernels.lowering.compiler import intrinsic_of
from tests.ptx_on_cpu.build import unavailable

needs_gcc = pytest.mark.skipif(bool(unavailable()) and not os.environ.get("CI"), reason=str(unavailable()))

f32, i32, i64, u32, void = types.float32, types.int32, types.int64, types.uint32, types.void
TARGETS = {"sm_89": (8, 9), "sm_90a": (9, 0, "a"), "sm_120": (12, 0)}

# PTX by hand


def ptx(parameters: str, body: str, target: str = "sm_90a", shared: int = 0) -> str:
    """A module whose kernel has these `parameters` ("x:u64 n:u32", loaded into registers of those names) and `body`.

    Predicates %p0..., registers %h0... (16 bits), %r0... (32), %d0... (64), %f0... (float32) and %e0... (float64) are
    declared, and `shared` bytes of shared memory named memory.
    """
    pairs = [p.split(":") for p in parameters.split()]
    declared = ", ".join(f".param .{kind} param_{name}" for name, kind in pairs)
    loads = "\n".join(f".reg .{kind} {name}; ld.param.{kind} {name}, [param_{name}];" for name, kind in pairs)
    memory = f".shared .align 1024 .b8 memory[{shared}];" if shared else ""
    return f"""
.version 9.0
.target {target}
.address_size 64
{memory}
.visible .entry kernel({declared})
{{
.reg .pred %p<16>; .reg .b16 %h<64>; .reg .b32 %r<64>; .reg .b64 %d<64>; .reg .f32 %f<64>; .reg .f64 %e<64>;
{loads}
{body}
ret;
}}
"""


_MEMORY = {"e": ("f64", 8), "f": ("f32", 4), "d": ("b64", 8), "r": ("b32", 4), "h": ("b16", 2)}


def elementwise(sources: str, targets: str, body: str) -> str:
    """A kernel of one thread for each element: `body` computes the registers `targets` from the registers `sources`,
    loaded from arrays of the registers' types. Parameters: the arrays of both, and the number of elements."""
    names = [*sources.split(), *targets.split()]
    lines = [
        "mov.u32 %r60, %ctaid.x; mov.u32 %r61, %ntid.x; mov.u32 %r62, %tid.x; mad.lo.u32 %r63, %r60, %r61, %r62;",
        "setp.ge.u32 %p15, %r63, n; @%p15 bra FINISH;",
    ]
    for k, name in enumerate(names):
        kind, size = _MEMORY[name[1]]
        lines.append(f"mul.wide.u32 %d63, %r63, {size}; add.u64 a{k}, a{k}, %d63;")
        if k < len(sources.split()):
            lines.append(f"ld.global.{kind} {name}, [a{k}];")
    lines.append(body)
    for k, name in enumerate(targets.split(), len(sources.split())):
        lines.append(f"st.global.{_MEMORY[name[1]][0]} [a{k}], {name};")
    arrays = " ".join(f"a{k}:u64" for k in range(len(names)))
    return ptx(f"{arrays} n:u32", "\n".join([*lines, "FINISH:"]))


# Numba kernels, compiled as the project compiles its own


def compiled(kernel: Any, arguments: Any, threads: int, target: str, lineinfo: bool = False) -> str:
    """The PTX of a kernel, linked with link-time optimization."""
    ltoir, _ = cuda.compile(
        kernel,
        arguments,
        device=False,
        abi="numba",
        cc=TARGETS[target],
        launch_bounds=(threads, 1),
        output="ltoir",
        lineinfo=lineinfo,
    )
    options = LinkerOptions(arch=target, link_time_optimization=True, ptx=True, lineinfo=lineinfo)
    code = Linker(ObjectCode.from_ltoir(ltoir), options=options).link("ptx").code
    return bytes(code).decode().rstrip("\0")


_LETTERS = {"i16": "h", "i32": "r", "i64": "l", "float": "f"}


def asm(template: str, result: Any = void, *operands: Any) -> Any:
    """One PTX template as a function: ``$0 $1 ...`` are first the results, then the operands. An operand that has the
    tuple type of the result is read and written in the same registers."""
    results = [] if result is void else list(result) if isinstance(result, types.BaseTuple) else [result]

    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        kinds = [context.get_value_type(kind) for kind in results]
        constraints = ["=" + _LETTERS[str(kind)] for kind in kinds]
        inputs: list[Any] = []
        for operand, value in zip(operands, values):
            parts = unpack_tuple(builder, value) if isinstance(operand, types.BaseTuple) else [value]
            tied = isinstance(operand, types.BaseTuple) and operand == result
            constraints += [str(k) if tied else _LETTERS[str(part.type)] for k, part in enumerate(parts)]
            inputs += parts
        returned = ir.VoidType() if not kinds else kinds[0] if len(kinds) == 1 else ir.LiteralStructType(kinds)
        function = ir.FunctionType(returned, [x.type for x in inputs])
        code = ir.InlineAsm(function, template, ",".join([*constraints, "~{memory}"]), side_effect=True)
        value = builder.call(code, inputs)
        if len(results) > 1:
            return pack_array(builder, [builder.extract_value(value, k) for k in range(len(results))])
        return value if results else context.get_dummy_value()

    return intrinsic_of(template.split()[0], len(operands), lambda context, *_: (signature(result, *operands), lower))


def registers(count: int, kind: Any = f32) -> Any:
    return types.UniTuple(kind, count)


class _TensorMap(types.Type):  # type: ignore[misc]
    """A tensor map that is passed to a kernel by value."""


tensor_map = _TensorMap("TensorMap")
_TENSOR_MAP_BYTES = ir.ArrayType(ir.IntType(64), 16)


@register_model(_TensorMap)
class _TensorMapModel(core_models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _TENSOR_MAP_BYTES.as_pointer())


def _by_value(context: Any) -> Any:
    """Tells the compiler that the kernel's tensor maps lie in its parameters."""

    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        module, function = builder.module, builder.function
        maps = [k for k, a in enumerate(function.args) if a.type == _TENSOR_MAP_BYTES.as_pointer()]
        for k in maps:
            set.add(function.args[k].attributes, "byval ")  # without a type, as NVVM's dialect spells it
            function.args[k].attributes.align = 64
        indices = module.add_metadata([ir.IntType(32)(k) for k in maps])
        node = module.add_metadata([function, ir.MetaDataString(module, "grid_constant"), indices])
        get_or_insert_named_metadata(module, "nvvm.annotations").add(node)
        return context.get_dummy_value()

    return signature(void), lower


def _shared_address(context: Any) -> Any:
    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        kind = ir.ArrayType(ir.IntType(8), 0)
        memory = ir.GlobalVariable(builder.module, kind, "dynamic_shared", addrspace=3)
        memory.linkage, memory.align = "external", 1024
        return builder.ptrtoint(memory, ir.IntType(32))

    return signature(i32), lower


def _address_of_map(context: Any, x: Any) -> Any:
    return signature(i64, x), lambda context, builder, sig, values: builder.ptrtoint(values[0], ir.IntType(64))


def _zeros(count: int) -> Any:
    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        return ir.Constant(context.get_value_type(sig.return_type), None)

    return intrinsic_of("zeros", 0, lambda context: (signature(registers(count)), lower))


def _sum(count: int) -> Any:
    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        xs, ys = (unpack_tuple(builder, value) for value in values)
        return pack_array(builder, [builder.fadd(x, y) for x, y in zip(xs, ys)])

    return intrinsic_of("sum", 2, lambda context, x, y: (signature(*(registers(count),) * 3), lower))


def _packed_bf16(count: int, into: Any) -> Any:
    """`count` scaled float32 registers as pairs of bfloat16, in a local array."""

    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        xs = [builder.fmul(x, values[1]) for x in unpack_tuple(builder, values[0])]
        data = context.make_array(sig.args[2])(context, builder, values[2]).data
        kind = ir.FunctionType(ir.IntType(32), [ir.FloatType()] * 2)
        code = ir.InlineAsm(kind, "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f")
        for k in range(0, count, 2):
            builder.store(builder.call(code, xs[k : k + 2]), builder.gep(data, [ir.IntType(32)(k // 2)]))
        return context.get_dummy_value()

    return intrinsic_of(
        "packed_bf16", 3, lambda context, x, s, a: (signature(void, registers(count), f32, into), lower)
    )


by_value = intrinsic_of("by_value", 0, _by_value)
shared_address = intrinsic_of("shared_address", 0, _shared_address)
address_of_map = intrinsic_of("address_of_map", 1, _address_of_map)
quotient = asm("div.s32 $0, $1, $2;", i32, i32, i32)
elect = asm("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 $0, 1, 0, p; }", i32)
broadcast = asm("shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", i32, i32)
cluster_rank = asm("mov.u32 $0, %cluster_ctarank;", i32)
cluster_sync = asm("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")
named_barrier = asm("bar.sync $0, $1;", void, i32, i32)
fewer_registers = asm("setmaxnreg.dec.sync.aligned.u32 56;")
more_registers = asm("setmaxnreg.inc.sync.aligned.u32 224;")
barrier_init = asm("mbarrier.init.shared::cta.b64 [$0], $1;", void, i32, i32)
barrier_fence = asm("fence.mbarrier_init.release.cluster;")
barrier_expect = asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", void, i32, i32)
barrier_arrive = asm(
    "{ .reg .b32 a; mapa.shared::cluster.u32 a, $0, $1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [a]; }",
    void,
    i32,
    i32,
)
barrier_wait = asm(
    "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [$0], $1; @!p bra again; }", void, i32, i32
)
tensor_load = asm(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1, {$3, $4}], [$2];",
    *(void, i32, i64, i32, i32, i32),
)
tensor_load_to_all = asm(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
    "[$0], [$1, {$3, $4}], [$2], $5;",
    *(void, i32, i64, i32, i32, i32, types.int16),
)
tensor_store = asm(
    "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [$0, {$2, $3}], [$1];", void, i64, i32, i32, i32
)
store_commit = asm("cp.async.bulk.commit_group;")
store_wait = asm("cp.async.bulk.wait_group.read 0;")
proxy_fence = asm("fence.proxy.async.shared::cta;")
store_matrices = asm("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};", void, i32, u32, u32, u32, u32)
wgmma_fence = asm("wgmma.fence.sync.aligned;")
wgmma_commit = asm("wgmma.commit_group.sync.aligned;")
wgmma_wait_older = asm("wgmma.wait_group.sync.aligned 1;")

ROW = 128  # bytes of a row of a tile in shared memory: the width of the swizzle
K_MAJOR = (1 << 62) | (64 << 32)  # matrix descriptor: 128-byte swizzle, 1024 bytes between groups of 8 rows


def _wgmma(n: int) -> Any:
    count = n // 2
    accumulators = ", ".join(f"${k}" for k in range(count))
    return asm(
        f"{{ .reg .pred p; setp.ne.b32 p, ${2 * count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
        f"{{{accumulators}}}, ${2 * count}, ${2 * count + 1}, p, 1, 1; }}",
        *(registers(count), registers(count), i64, i64, i32),
    )


@cache
def hopper_gemm(n_tile: int, cluster: int, split: bool = False) -> tuple[str, int, int]:
    """D = s A Bᵀ, of FP8 A [m, k] and B [n, k], in bfloat16. Gives PTX, threads of a block, bytes of shared memory.

    Persistent blocks of 128 x `n_tile` tiles. One warp copies tiles to a ring of four places in shared memory, two
    warpgroups multiply them, 64 rows each. `full` barriers count the bytes that arrived at a place, `empty` ones the
    warpgroups that are done with it. Blocks of a cluster share B: each loads a part of it for all. With `split`, the
    tensor cores sum 128 products at a time, and the partial sums are added in float32.
    """
    stages, a_bytes, b_bytes = 4, 128 * ROW, n_tile * ROW
    b_rows, everyone = n_tile // cluster, (1 << cluster) - 1
    b_part, words_count, count = b_rows * ROW, n_tile // 4, n_tile // 2
    out_bytes = 64 * 256
    out_start = stages * (a_bytes + b_bytes)
    full_start = out_start + 2 * out_bytes
    empty_start = full_start + 8 * stages
    halves = n_tile // 128

    zeros, multiply, add = _zeros(count), _wgmma(n_tile), _sum(count)
    finish = asm("wgmma.wait_group.sync.aligned 0;", registers(count), registers(count))
    packed = _packed_bf16(count, types.Array(u32, 1, "C"))

    def gemm(map_a: Any, map_b: Any, map_d: Any, scale: Any, m: Any, n: Any, k: Any) -> None:
        by_value()
        a_map, b_map, d_map = address_of_map(map_a), address_of_map(map_b), address_of_map(map_d)
        smem = shared_address()
        full, empty = smem + full_start, smem + empty_start
        group, warp = broadcast(cuda.threadIdx.x >> 7), broadcast(cuda.threadIdx.x >> 5)
        rank = cluster_rank()
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                barrier_init(full + 8 * s, 1)
                barrier_init(empty + 8 * s, 2 * cluster)
            barrier_fence()
        cluster_sync()

        m_tiles, n_tiles = quotient(m + 128 * cluster - 1, 128 * cluster), quotient(n + n_tile - 1, n_tile)
        steps = quotient(k + ROW - 1, ROW)
        tile, step = quotient(cuda.blockIdx.x, cluster), 0
        if group == 2:
            fewer_registers()
            if warp == 8 and elect():
                while tile < m_tiles * n_tiles:
                    i = quotient(tile, n_tiles)
                    row, column = (i * cluster + rank) * 128, (tile - i * n_tiles) * n_tile
                    for kk in range(steps):
                        place, turn = step & 3, (step >> 2) & 1
                        ready = full + 8 * place
                        barrier_wait(empty + 8 * place, turn ^ 1)
                        barrier_expect(ready, a_bytes + b_bytes)
                        tensor_load(smem + place * a_bytes, a_map, ready, kk * ROW, row)
                        b = smem + stages * a_bytes + place * b_bytes + rank * b_part
                        tensor_load_to_all(b, b_map, ready, kk * ROW, column + rank * b_rows, everyone)
                        step += 1
                    tile += quotient(cuda.gridDim.x, cluster)
        else:
            more_registers()
            thread, lane = cuda.threadIdx.x & 127, cuda.threadIdx.x & 31
            out = smem + out_start + group * out_bytes
            line = (warp & 3) * 16 + (lane & 15)
            words = cuda.local.array(words_count, u32)
            while tile < m_tiles * n_tiles:
                acc = zeros()
                for kk in range(steps):
                    place, turn = step & 3, (step >> 2) & 1
                    barrier_wait(full + 8 * place, turn)
                    x = K_MAJOR | (((smem + place * a_bytes + group * (64 * ROW)) & 0x3FFFF) >> 4)
                    y = K_MAJOR | (((smem + stages * a_bytes + place * b_bytes) & 0x3FFFF) >> 4)
                    wgmma_fence()
                    if split:
                        part = multiply(zeros(), x, y, 0)
                        part = multiply(part, x + 2, y + 2, 1)
                        part = multiply(part, x + 4, y + 4, 1)
                        part = multiply(part, x + 6, y + 6, 1)
                        wgmma_commit()
                        acc = add(acc, finish(part))
                        if thread < cluster:
                            barrier_arrive(empty + 8 * place, thread)
                    else:
                        acc = multiply(acc, x, y, kk)
                        acc = multiply(acc, x + 2, y + 2, 1)
                        acc = multiply(acc, x + 4, y + 4, 1)
                        acc = multiply(acc, x + 6, y + 6, 1)
                        wgmma_commit()
                        wgmma_wait_older()
                        if kk > 0 and thread < cluster:
                            barrier_arrive(empty + 8 * ((step - 1) & 3), thread)
                    step += 1
                if not split:
                    acc = finish(acc)
                    if thread < cluster:
                        barrier_arrive(empty + 8 * ((step - 1) & 3), thread)

                packed(acc, scale[0], words)
                i = quotient(tile, n_tiles)
                row, column = (i * cluster + rank) * 128 + group * 64, (tile - i * n_tiles) * n_tile
                for half in range(halves):
                    if thread == 0:
                        store_wait()
                    named_barrier(1 + group, 128)
                    for c in range(8):
                        chunk = ((c & 3) * 2 + (lane >> 4)) ^ (line & 7)
                        w = half * 32 + c * 4
                        target = out + (c >> 2) * 8192 + line * 128 + chunk * 16
                        store_matrices(target, words[w], words[w + 1], words[w + 2], words[w + 3])
                    proxy_fence()
                    named_barrier(1 + group, 128)
                    if thread == 0:
                        tensor_store(d_map, out, column + half * 128, row)
                        tensor_store(d_map, out + 8192, column + half * 128 + 64, row)
                        store_commit()
                tile += quotient(cuda.gridDim.x, cluster)
            if thread == 0:
                store_wait()
        if cluster > 1:
            cluster_sync()

    arguments = void(tensor_map, tensor_map, tensor_map, types.CPointer(f32), i32, i32, i32)
    return compiled(gemm, arguments, 384, "sm_90a"), 384, empty_start + 8 * stages


copy_async = asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", void, i32, i64, i32)
copy_commit = asm("cp.async.commit_group;")
copy_wait = asm("cp.async.wait_group 0;")
load_matrices = asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", registers(4, u32), i32)
mma = asm(
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};",
    *(registers(4), *(f32,) * 4, *(u32,) * 6),
)
store_pair = asm("st.global.v2.f32 [$0], {$1, $2};", void, i64, f32, f32)


@cache
def mma_gemm(target: str) -> tuple[str, int, int]:
    """D = A Bᵀ, of FP8 A [m, k] and B [n, k], in float32. Gives PTX, threads of a block, bytes of shared memory.

    A block of four warps has a 32 x 32 tile: each warp 16 x 16 of it, 64 of k at a time.
    """
    pitch, rows = 80, 32

    def gemm(a: Any, b: Any, d: Any, m: Any, n: Any, k: Any) -> None:
        smem = shared_address()
        thread, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
        row0, column0 = cuda.blockIdx.y * rows, cuda.blockIdx.x * rows
        r, q = thread >> 2, (thread & 3) * 16
        acc = cuda.local.array(8, f32)
        for j in range(8):
            acc[j] = f32(0)
        for k0 in range(0, k, 64):
            a_inside = 16 if row0 + r < m and k0 + q < k else 0
            b_inside = 16 if column0 + r < n and k0 + q < k else 0
            copy_async(smem + r * pitch + q, a + (row0 + r) * k + k0 + q, a_inside)
            copy_async(smem + (rows + r) * pitch + q, b + (column0 + r) * k + k0 + q, b_inside)
            copy_commit()
            copy_wait()
            cuda.syncthreads()
            line, half = lane & 15, (lane >> 4) * 16
            for kk in range(0, 64, 32):
                x = load_matrices(smem + ((warp & 1) * 16 + line) * pitch + kk + half)
                y = load_matrices(smem + (rows + (warp >> 1) * 16 + line) * pitch + kk + half)
                c = mma(acc[0], acc[1], acc[2], acc[3], x[0], x[1], x[2], x[3], y[0], y[2])
                acc[0], acc[1], acc[2], acc[3] = c[0], c[1], c[2], c[3]
                c = mma(acc[4], acc[5], acc[6], acc[7], x[0], x[1], x[2], x[3], y[1], y[3])
                acc[4], acc[5], acc[6], acc[7] = c[0], c[1], c[2], c[3]
            cuda.syncthreads()
        for j in range(2):
            for h in range(2):
                row = row0 + (warp & 1) * 16 + (lane >> 2) + 8 * h
                column = column0 + (warp >> 1) * 16 + 8 * j + (lane & 3) * 2
                if row < m and column < n:
                    store_pair(d + (row * n + column) * 4, acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1])

    return compiled(gemm, void(i64, i64, i64, i32, i32, i32), 128, target), 128, 2 * rows * pitch
