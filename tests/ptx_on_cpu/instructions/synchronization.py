"""Barriers and fences."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import Instruction
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_KINDS = "sync arrive red and or popc cta aligned warp"


@instruction("bar", options=f"{_KINDS} pred u32")
@instruction("barrier", options=f"{_KINDS} pred u32 cluster wait release acquire relaxed")
def barrier(w: Writer, i: Instruction) -> None:
    w.mark()
    if i.has("cluster"):
        _cluster_barrier(w, i)
    elif i.has("warp"):
        w.emit(f"rt_warp_sync(t, {w.bits(i.operands[0], 'u32')});")
    elif i.has("red"):
        _reducing_barrier(w, i)
    else:
        count = w.bits(i.operands[1], "u32") if len(i.operands) > 1 else "0"
        function = "rt_bar_arrive" if i.has("arrive") else "rt_bar_sync"
        w.emit(f"{function}(t, {w.bits(i.operands[0], 'u32')}, {count}, {_aligned(i)});")


def _aligned(i: Instruction) -> str:
    """bar is short for barrier.cta.aligned."""
    return str(i.opcode == "bar" or i.has("aligned")).lower()


def _reducing_barrier(w: Writer, i: Instruction) -> None:
    target, number, *count, predicate = i.operands
    operation = {"and": "REDUCE_AND", "or": "REDUCE_OR", "popc": "REDUCE_ADD"}[i.one_of("and", "or", "popc") or ""]
    threads = w.bits(count[0], "u32") if count else "0"
    arguments = f"{w.bits(number, 'u32')}, {threads}, {_aligned(i)}, {w.predicate(predicate)}, {operation}"
    w.assign(target, "u32" if i.has("popc") else "pred", f"rt_bar_reduce(t, {arguments})")


def _cluster_barrier(w: Writer, i: Instruction) -> None:
    step = "arrive" if i.has("arrive") else "wait"
    w.emit(f"rt_cluster_{step}(t, {_aligned(i)}, {str(not i.has('relaxed')).lower()});")


@instruction("membar", options="cta gl sys")
def membar(w: Writer, i: Instruction) -> None:
    """Accesses are visible to all threads at once; only release and acquire between blocks are tracked."""
    if i.has("gl", "sys"):
        w.emit("rt_global_release(t);", "rt_global_acquire(t);")


@instruction(
    "fence",
    options="cta cluster gpu sys sc acq_rel acquire release proxy alias async async::* shared::* global mbarrier_init",
)
def fence(w: Writer, i: Instruction) -> None:
    """Only fences to the asynchronous proxy, fences of mbarrier_init, and fences between blocks have an effect."""
    if i.has("gpu", "sys") and i.has("sc", "acq_rel", "acquire", "release") and not i.has("proxy"):
        w.emit(*(() if i.has("acquire") else ("rt_global_release(t);",)))
        w.emit(*(() if i.has("release") else ("rt_global_acquire(t);",)))
    to_async = i.has("async") or any(m.startswith("async::") for m in i.modifiers)
    if i.has("mbarrier_init"):
        w.emit("rt_barrier_init_fence(t);")
    elif to_async and not i.has("global"):
        w.emit("rt_proxy_fence(t);")


@instruction("setmaxnreg", types="u32", options="inc dec sync aligned")
def setmaxnreg(w: Writer, i: Instruction) -> None:
    count = int(i.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise Unsupported(f"setmaxnreg to {count} registers: a multiple of 8 from 24 to 256")
    w.mark()
    w.emit(f"rt_set_registers(t, {count}, {str(i.has('inc')).lower()});")
