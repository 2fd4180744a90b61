"""cp.async and cp.async.bulk: asynchronous copies."""

from __future__ import annotations

import re

from tests.ptx_on_cpu.parse import Instruction
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction

_BULK = "bulk bulk_group tensor tile 1d 2d 3d 4d 5d mbarrier::complete_tx::bytes multicast::cluster prefetch L2"
_GROUPS = "commit_group wait_group wait_all read"


@instruction("cp", options=f"async reduce add f32 ca cg global shared shared::* L2::* {_GROUPS} {_BULK}")
def cp(w: Writer, i: Instruction) -> None:
    if i.has("bulk"):
        _bulk(w, i)
    elif i.modifiers[:1] == ("async",):
        _small(w, i)
    else:
        raise Unsupported(f"cp.{'.'.join(i.modifiers)}")


def _small(w: Writer, i: Instruction) -> None:
    w.unit.uses_cp_async = True
    w.mark()
    if i.has("wait_all"):
        w.emit("rt_cp_async_commit(t);", "rt_cp_async_wait(t, 0);")
    elif i.has("commit_group"):
        w.emit("rt_cp_async_commit(t);")
    elif i.has("wait_group"):
        w.emit(f"rt_cp_async_wait(t, {w.bits(i.operands[0], 'u32')});")
    else:
        target, source, size, *rest = i.operands[:-1] if i.has("L2::cache_hint") else i.operands
        bytes_ = int(size, 0)
        if bytes_ not in (4, 8, 16) or (i.has("cg") and bytes_ != 16):
            raise Unsupported(f"cp.async of {size} bytes")
        read = w.bits(rest[0], "u32") if rest else bytes_
        with w.braces():
            w.emit("static u32 hit;")
            w.emit(f"rt_cp_async(t, {w.address(target)}, {w.address(source)}, {bytes_}, {read}, &hit);")


def _bulk(w: Writer, i: Instruction) -> None:
    w.unit.uses_async_proxy = True
    w.mark()
    spaces = [m.split("::")[0] for m in i.modifiers if m.startswith(("shared", "global"))]
    if i.has("commit_group"):
        w.emit("rt_bulk_commit(t);")
    elif i.has("wait_group"):
        w.emit(f"rt_bulk_wait(t, {w.bits(i.operands[0], 'u32')}, {str(i.has('read')).lower()});")
    elif i.has("prefetch"):
        pass
    elif i.has("reduce") and spaces != ["global", "shared"]:
        raise Unsupported(f"cp.{'.'.join(i.modifiers)}")
    elif i.has("tensor"):
        _tensor(w, i, spaces)
    else:
        _bytes(w, i, spaces)


def _adds(i: Instruction) -> str:
    """Whether a store is a reduction with add, the only supported one."""
    if i.has("reduce") and (not i.has("add") or (not i.has("tensor") and not i.has("f32"))):
        raise Unsupported(f"cp.{'.'.join(i.modifiers)}")
    return str(i.has("reduce")).lower()


def _multicast(w: Writer, i: Instruction, operands: tuple[str, ...]) -> str:
    return f"true, {w.bits(operands[0], 'u16')}" if i.has("multicast::cluster") else "false, 0"


def _tensor(w: Writer, i: Instruction, spaces: list[str]) -> None:
    is_load = spaces == ["shared", "global"]
    if not is_load and spaces != ["global", "shared"]:
        raise Unsupported(f"cp.{'.'.join(i.modifiers)}")
    target, source = i.operands[:2]
    match = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*(\{.*\})\s*\]", source if is_load else target, re.DOTALL)
    if not match:
        raise Unsupported("tensor coordinates of this form")
    tensor_map, corner = w.bits(match[1], "u64"), w.vector(match[2])
    if not i.has(f"{len(corner)}d"):
        raise Unsupported(f"{len(corner)} coordinates")
    with w.braces():
        w.emit(f"s32 corner[] = {{{', '.join(w.value(c, 's32') for c in corner)}}};")
        where = f"{tensor_map}, corner, {len(corner)}"
        if is_load:
            mbarrier, multicast = w.address(i.operands[2]), _multicast(w, i, i.operands[3:])
            w.emit(f"rt_tensor_load(t, {w.address(target)}, {where}, {mbarrier}, {multicast});")
        else:
            w.emit(f"rt_tensor_store(t, {where}, {w.address(source)}, {_adds(i)});")


def _bytes(w: Writer, i: Instruction, spaces: list[str]) -> None:
    target, source = (w.address(o) for o in i.operands[:2])
    size = w.bits(i.operands[2], "u32")
    if spaces == ["global", "shared"]:
        w.emit(f"rt_bulk_store(t, {target}, {source}, {size}, {_adds(i)});")
        return
    mbarrier = w.address(i.operands[3])
    if spaces == ["shared", "global"]:
        w.emit(f"rt_bulk_load(t, {target}, {source}, {size}, {mbarrier}, {_multicast(w, i, i.operands[4:])});")
    elif spaces == ["shared", "shared"]:
        w.emit(f"rt_bulk_between_blocks(t, {target}, {source}, {size}, {mbarrier});")
    else:
        raise Unsupported(f"cp.{'.'.join(i.modifiers)}")
