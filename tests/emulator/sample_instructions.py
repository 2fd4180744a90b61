"""Instructions of Hopper and of older GPUs for Numba's kernels, as the samples need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.cuda import types
from numba.cuda.cgutils import get_or_insert_named_metadata, pack_array, unpack_tuple
from numba.cuda.extending import core_models, register_model
from numba.cuda.typing import signature

from cuda_kernels.lowering.compiler import intrinsic_of
from tests.emulator.samples import f32, i32, i64, u32, void

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


def zero_registers(count: int) -> Any:
    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        return ir.Constant(context.get_value_type(sig.return_type), None)

    return intrinsic_of("zeros", 0, lambda context: (signature(registers(count)), lower))


def add_registers(count: int) -> Any:
    def lower(context: Any, builder: Any, sig: Any, values: Sequence[Any]) -> Any:
        xs, ys = (unpack_tuple(builder, value) for value in values)
        return pack_array(builder, [builder.fadd(x, y) for x, y in zip(xs, ys)])

    return intrinsic_of("sum", 2, lambda context, x, y: (signature(*(registers(count),) * 3), lower))


def pack_bf16(count: int, into: Any) -> Any:
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


def multiply_tiles(n: int) -> Any:
    count = n // 2
    accumulators = ", ".join(f"${k}" for k in range(count))
    return asm(
        f"{{ .reg .pred p; setp.ne.b32 p, ${2 * count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{n}k32.f32.e4m3.e4m3 "
        f"{{{accumulators}}}, ${2 * count}, ${2 * count + 1}, p, 1, 1; }}",
        *(registers(count), registers(count), i64, i64, i32),
    )


copy_async = asm("cp.async.cg.shared.global [$0], [$1], 16, $2;", void, i32, i64, i32)
copy_commit = asm("cp.async.commit_group;")
copy_wait = asm("cp.async.wait_group 0;")
load_matrices = asm("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", registers(4, u32), i32)
mma = asm(
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {$0,$1,$2,$3}, {$8,$9,$10,$11}, {$12,$13}, {$4,$5,$6,$7};",
    *(registers(4), *(f32,) * 4, *(u32,) * 6),
)
store_pair = asm("st.global.v2.f32 [$0], {$1, $2};", void, i64, f32, f32)
