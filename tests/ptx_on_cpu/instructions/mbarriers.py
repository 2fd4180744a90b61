"""mbarrier: barriers that count arrivals and bytes."""

from __future__ import annotations

from tests.ptx_on_cpu.parse import Instruction
from tests.ptx_on_cpu.writer import Unsupported, Writer, instruction


@instruction(
    "mbarrier",
    options="init inval arrive expect_tx test_wait try_wait parity b64 shared shared::* "
    "release acquire relaxed cta cluster",
)
def mbarrier(w: Writer, i: Instruction) -> None:
    kind = i.modifiers[0]
    w.mark()
    if kind == "init":
        w.emit(f"rt_mbarrier_init(t, {w.address(i.operands[0])}, {w.bits(i.operands[1], 'u32')});")
    elif kind == "inval":
        w.emit(f"rt_mbarrier_invalidate(t, {w.address(i.operands[0])});")
    elif kind == "expect_tx":
        w.emit(f"rt_mbarrier_expect(t, {w.address(i.operands[0])}, {w.bits(i.operands[1], 'u32')}, {_in_cluster(i)});")
    elif kind == "arrive":
        _arrive(w, i)
    elif kind in ("test_wait", "try_wait"):
        _test(w, i)
    else:
        raise Unsupported(f"mbarrier.{kind}")


def _in_cluster(i: Instruction) -> str:
    return str(i.has("shared::cluster")).lower()


def _release(i: Instruction) -> str:
    """By default a release at the scope of the block (PTX ISA, mbarrier.arrive)."""
    if i.has("relaxed"):
        return "RELAXED"
    return "RELEASE_CLUSTER" if i.has("cluster") else "RELEASE_CTA"


def _arrive(w: Writer, i: Instruction) -> None:
    operands = list(i.operands)
    token = operands.pop(0) if not operands[0].startswith("[") else "_"
    if token != "_" and i.has("shared::cluster"):
        raise Unsupported("a token from an mbarrier of shared::cluster")
    argument = w.bits(operands[1], "u32") if len(operands) > 1 else None
    count, expected = ("1", argument) if i.has("expect_tx") else (argument or "1", "0")
    what = f"{w.address(operands[0])}, {count}, {expected}, {_in_cluster(i)}, {_release(i)}"
    w.assign(token, "b64", f"rt_mbarrier_arrive(t, {what})")


def _test(w: Writer, i: Instruction) -> None:
    """try_wait has an operand for a time limit, which is ignored."""
    target, address, phase = i.operands[:3]
    parity = w.bits(phase, "u32") if i.has("parity") else f"(u32){w.bits(phase, 'b64')}"
    may_block, acquires = (str(x).lower() for x in (i.modifiers[0] == "try_wait", not i.has("relaxed")))
    w.assign(target, "pred", f"rt_mbarrier_test(t, {w.address(address)}, {parity}, {may_block}, {acquires})")
