"""Collective instructions of a warp."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import Instruction
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction


@instruction("shfl", types="b32", options="sync up down bfly idx")
def shfl(w: Writer, i: Instruction) -> None:
    modes = {"up": "SHUFFLE_UP", "down": "SHUFFLE_DOWN", "bfly": "SHUFFLE_BUTTERFLY", "idx": "SHUFFLE_INDEX"}
    mode = modes[i.one_of(*modes) or ""]
    target, *in_range = (x.strip() for x in i.operands[0].split("|"))
    value, source, clamp, mask = (w.bits(o, "u32") for o in i.operands[1:])
    w.mark()
    with w.braces():
        w.emit(f"Shuffle shuffle = {{.value = {value}, .source = {source}, .clamp = {clamp}, .mode = {mode}}};")
        w.emit(f"rt_shuffle(t, {mask}, &shuffle);")
        w.assign(target, "b32", "shuffle.result")
        if in_range:
            w.assign(in_range[0], "pred", "shuffle.in_range")


@instruction("vote", types="pred b32", options="sync all any uni ballot")
def vote(w: Writer, i: Instruction) -> None:
    operations = {"all": "VOTE_ALL", "any": "VOTE_ANY", "uni": "VOTE_UNIFORM", "ballot": "VOTE_BALLOT"}
    operation = operations[i.one_of(*operations) or ""]
    w.mark()
    target, predicate, mask = i.operands
    w.assign(target, i.type, f"rt_vote(t, {w.bits(mask, 'u32')}, {w.predicate(predicate)}, {operation})")


@instruction("match", types="b32 b64", options="any sync")
def match_any(w: Writer, i: Instruction) -> None:
    w.mark()
    target, value, mask = i.operands
    w.assign(target, "b32", f"rt_match_any(t, {w.bits(mask, 'u32')}, {w.bits(value, i.type)})")


@instruction("redux", types="b32 u32 s32", options="sync add min max and or xor")
def redux(w: Writer, i: Instruction) -> None:
    operation = (i.one_of("add", "min", "max", "and", "or", "xor") or "").upper()
    if operation in ("MIN", "MAX"):
        operation += f"_{i.type[0].upper()}"
    w.mark()
    target, value, mask = i.operands
    w.assign(target, "b32", f"rt_redux(t, {w.bits(mask, 'u32')}, {w.bits(value, 'b32')}, REDUCE_{operation})")


@instruction("activemask", types="b32")
def activemask(w: Writer, i: Instruction) -> None:
    raise Unsupported("activemask: which lanes run together is not modelled")


@instruction("elect", options="sync")
def elect(w: Writer, i: Instruction) -> None:
    leader, elected = (x.strip() for x in i.operands[0].split("|"))
    w.mark()
    with w.braces():
        w.emit("u32 leader;")
        w.assign(elected, "pred", f"rt_elect(t, {w.bits(i.operands[1], 'u32')}, &leader)")
        w.assign(leader, "b32", "leader")
