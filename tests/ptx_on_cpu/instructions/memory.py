"""Moves, addresses, loads, stores and atomics."""

from __future__ import annotations

from collections.abc import Sequence

from tests.ptx_on_cpu.parse import BITS, Instruction
from tests.ptx_on_cpu.types import as_bits, as_value, is_integer, signed, unsigned
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_TYPES = "b8 u8 s8 b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64"
_SPACES = "global shared shared::* local param param::* const"
_SCOPES = "cta cluster gpu sys"
_HINTS = "nc ca cg cs lu cv wb wt L1::* L2::* level::*"


@instruction("mov", types="pred b16 u16 s16 b32 u32 s32 f32 b64 u64 s64 f64 f16 bf16 f16x2 bf16x2")
def mov(w: Writer, i: Instruction) -> None:
    target, source = i.operands
    if i.type == "pred":
        w.assign(target, "pred", w.predicate(source))
    elif target.startswith("{"):
        _unpack(w, w.vector(target), w.bits(source, i.type), BITS[i.type])
    elif source.startswith("{"):
        w.assign(target, f"b{BITS[i.type]}", _packed(w, w.vector(source), BITS[i.type]))
    else:
        keeps = w.register(target).number is not None
        w.assign(target, f"b{BITS[i.type]}", (w.copied if keeps else w.bits)(source, i.type))


def _unpack(w: Writer, targets: list[str], source: str, width: int) -> None:
    part = width // len(targets)
    with w.braces():
        w.emit(f"u64 whole = {source};")
        for k, target in enumerate(targets):
            if target != "_":
                w.assign(target, f"b{part}", f"whole >> {k * part}")


def _packed(w: Writer, sources: list[str], width: int) -> str:
    part = width // len(sources)
    return " | ".join(f"(u64){w.bits(source, f'b{part}')} << {k * part}" for k, source in enumerate(sources))


def _space(i: Instruction) -> str:
    """The state space, or "generic" if none is given."""
    for modifier in i.modifiers:
        name = modifier.split("::")[0]
        if name in ("global", "shared", "local", "param", "const"):
            return "global" if name == "const" else name
    return "generic"


@instruction("cvta", types="u32 u64", options="to global shared local const param shared::*")
def cvta(w: Writer, i: Instruction) -> None:
    source = w.bits(i.operands[1], i.type)
    if _space(i) == "shared":
        source = f"rt_generic_to_shared(t, {source})" if i.has("to") else f"rt_shared_to_generic(t, {source})"
        w.mark()
    elif _space(i) == "param":
        source = f"rt_generic_to_parameter(t, {source})" if i.has("to") else f"rt_parameter_to_generic(t, {source})"
        w.mark()
    w.assign(i.operands[0], i.type, source)


@instruction("isspacep", options="global shared shared::*")
def isspacep(w: Writer, i: Instruction) -> None:
    inside = f"rt_is_shared(t, {w.bits(i.operands[1], 'u64')})"
    w.assign(i.operands[0], "pred", inside if _space(i) == "shared" else f"!{inside}")


@instruction("mapa", types="u32 u64", options="shared::cluster")
def mapa(w: Writer, i: Instruction) -> None:
    w.mark()
    generic = str(not i.has("shared::cluster")).lower()
    address, rank = w.bits(i.operands[1], i.type), w.bits(i.operands[2], "u32")
    w.assign(i.operands[0], i.type, f"rt_map_shared_rank(t, {address}, {rank}, {generic})")


def _vector_length(i: Instruction) -> int:
    vector = i.one_of("v2", "v4", "v8")
    return int(vector[1]) if vector else 1


def _access(w: Writer, i: Instruction, address: str, size: int, access: str) -> str:
    """The host pointer of an access, after its checks. Needs braces around it, for `hit`."""
    space, pointer = _space(i), w.address(address)
    if space == "shared":
        window = "cluster_shared_at" if i.has("shared::cluster") else "shared_at"
        return f"{window}(t, {pointer}, {size}, {access})"
    if space == "local":
        return f"local_at(t, {pointer}, {size}, {'depot' if w.depot_bytes else '0'}, DEPOT_BYTES)"
    w.emit("static u32 hit;")
    return f"{space}_at(t, {pointer}, {size}, {access}, &hit)"


_STRONG = ("volatile", "relaxed", "acquire", "release")


def _is_global(i: Instruction) -> bool:
    return _space(i) in ("global", "generic")


def _reaches_other_blocks(i: Instruction) -> bool:
    return _is_global(i) and i.has("gpu", "sys")


def _memory_type(kind: str) -> str:
    """The type for extending a loaded value: signed integers by their sign, others by zeros."""
    return kind if is_integer(kind) else f"b{BITS[kind]}"


def _c_type(kind: str) -> str:
    return signed(kind) if kind[0] == "s" else unsigned(kind)


def _check_ordering(i: Instruction) -> None:
    """Raises :class:`Unsupported` for acquire and release in shared memory, which the race detector does not model."""
    if _space(i) == "shared" and i.has("acquire", "release", "acq_rel"):
        raise Unsupported(f"{i.opcode}.{i.one_of('acquire', 'release', 'acq_rel')}.shared")


@instruction("ld", types=_TYPES, options=f"{_SPACES} {_SCOPES} {_HINTS} weak volatile relaxed acquire v2 v4 v8")
def ld(w: Writer, i: Instruction) -> None:
    _check_ordering(i)
    targets, size, count = w.vector(i.operands[0]), BITS[i.type] // 8, _vector_length(i)
    if len(targets) != count:
        raise Unsupported(f"{len(targets)} registers for a vector of {count}")
    with w.braces():
        if _space(i) == "param":
            pointer = w.parameter(i.operands[1])
        else:
            w.mark()
            pointer = _access(w, i, i.operands[1], size * count, "READ")
        w.emit(f"const u8 *source = {pointer};", f"{_c_type(i.type)} loaded[{count}];")
        if _is_global(i):
            access = "CONSTANT_READ" if i.has("nc") else "STRONG_READ" if i.has(*_STRONG) else "PLAIN_READ"
            w.emit(f"rt_global_access(t, source, {size * count}, {access});")
        w.emit(f"memcpy(loaded, source, {size * count});")
        for k, target in enumerate(targets):
            w.assign(target, _memory_type(i.type), f"loaded[{k}]")
    if i.has("acquire") and _reaches_other_blocks(i):
        w.emit("rt_global_acquire(t);")
    if i.has(*_STRONG) and _is_global(i):
        w.emit('rt_spin(t, "a value in memory");')  # it may be polled: let the thread run that will write it


@instruction(
    "st", types=_TYPES, options=f"{_SPACES} {_SCOPES} {_HINTS} weak volatile relaxed release v2 v4 v8 async mbarrier::*"
)
def st(w: Writer, i: Instruction) -> None:
    _check_ordering(i)
    sources, size, count = w.vector(i.operands[1]), BITS[i.type] // 8, _vector_length(i)
    if len(sources) != count:
        raise Unsupported(f"{len(sources)} registers for a vector of {count}")
    values = ", ".join(w.bits(source, f"b{8 * size}") for source in sources)
    with w.braces():
        w.emit(f"{unsigned(i.type)} stored[{count}] = {{{values}}};")
        if i.has("async"):
            w.unit.uses_async_proxy = True
            w.mark()
            target, mbarrier = w.address(i.operands[0]), w.address(i.operands[2])
            w.emit(f"rt_store_async(t, {target}, stored, {size * count}, {mbarrier});")
            return
        if _space(i) == "param":
            pointer = w.parameter(i.operands[0])
        else:
            w.mark()
            pointer = _access(w, i, i.operands[0], size * count, "WRITE")
        w.emit("t->stored = (u8 *)stored;", f"u8 *target = {pointer};", "t->stored = NULL;")
        if i.has("release") and _reaches_other_blocks(i):
            w.emit("rt_global_release(t);")
        if _is_global(i):
            access = "ATOMIC_WRITE" if i.has(*_STRONG) else "PLAIN_WRITE"
            w.emit(f"rt_global_access(t, target, {size * count}, {access});")
        w.emit(f"memcpy(target, stored, {size * count});")


@instruction("prefetch", options=f"{_SPACES} {_HINTS} L1 L2 tensormap")
def prefetch(w: Writer, i: Instruction) -> None:
    """No-op: caches are not modelled."""


@instruction("createpolicy", types="b64", options="fractional range L2::*")
def createpolicy(w: Writer, i: Instruction) -> None:
    w.assign(i.operands[0], "b64", "0")


_ATOMIC_TYPES = "b16 b32 b64 u32 s32 u64 s64 f32 f64"
_OPERATIONS = ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec")
_ORDERINGS = "relaxed acquire release acq_rel"
_ATOMIC_OPTIONS = f"global shared shared::* {_SCOPES} {_ORDERINGS} {' '.join(_OPERATIONS)} noftz"


def _updated(w: Writer, i: Instruction, operation: str, operands: Sequence[str]) -> str:
    """The C expression of the new bits, computed from the old ones in `old`."""
    kind = i.type
    bits = [w.bits(o, kind) for o in operands]
    x, y = as_value("old", kind), as_value(bits[0], kind)
    formulas = {
        "add": as_bits(f"({x} + {y})", kind),
        "min": as_bits(f"({x} < {y} ? {x} : {y})", kind),
        "max": as_bits(f"({x} > {y} ? {x} : {y})", kind),
        "and": f"old & {bits[0]}",
        "or": f"old | {bits[0]}",
        "xor": f"old ^ {bits[0]}",
        "exch": bits[0],
        "cas": f"old == {bits[0]} ? {bits[-1]} : old",
        "inc": f"old >= {bits[0]} ? 0 : old + 1",
        "dec": f"old == 0 || old > {bits[0]} ? {bits[0]} : old - 1",
    }
    return formulas[operation]


def _atomic(w: Writer, i: Instruction, target: str | None, address: str, operands: Sequence[str]) -> None:
    _check_ordering(i)
    operation = i.one_of(*_OPERATIONS)
    if operation is None or (i.type[0] == "f" and operation not in ("add", "exch")):
        raise Unsupported(f"{i.opcode}.{'.'.join(i.modifiers)}")
    kind = unsigned(i.type)
    w.mark()
    with w.braces():
        w.emit(f"u8 *word = {_access(w, i, address, BITS[i.type] // 8, 'ATOMIC')};")
        if i.has("release", "acq_rel") and _reaches_other_blocks(i):
            w.emit("rt_global_release(t);")
        if _is_global(i):
            w.emit(f"rt_global_access(t, word, {BITS[i.type] // 8}, ATOMIC_WRITE);")
        w.emit(f"{kind} old;", "memcpy(&old, word, sizeof old);")
        w.emit(f"{kind} new = {_updated(w, i, operation, operands)};", "memcpy(word, &new, sizeof new);")
        if target:
            w.assign(target, f"b{BITS[i.type]}", "old")
    if i.has("acquire", "acq_rel") and _reaches_other_blocks(i):
        w.emit("rt_global_acquire(t);")
    if target:
        w.emit('rt_spin(t, "a value in memory");')  # as in ld: it may be repeated until another thread stores


@instruction("atom", types=_ATOMIC_TYPES, options=_ATOMIC_OPTIONS)
def atom(w: Writer, i: Instruction) -> None:
    _atomic(w, i, i.operands[0], i.operands[1], i.operands[2:])


@instruction("red", types=_ATOMIC_TYPES, options=_ATOMIC_OPTIONS)
def red(w: Writer, i: Instruction) -> None:
    _atomic(w, i, None, i.operands[0], i.operands[1:])
