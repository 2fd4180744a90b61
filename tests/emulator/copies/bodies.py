"""PTX that copies, and what a copy without one of its parts leads to."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from tests.emulator.samples import ptx
from tests.ptx_on_cpu import EmulatorError, Program, TensorMap

ONE = (1, 1, 1)
modes = pytest.mark.parametrize("copies", ["eager", "late", "random"])


@cache
def program(text: str) -> Program:
    return Program(text)


def run(parameters: str, body: str, *args: Any, threads: int = 32, shared: int = 0, **options: Any) -> None:
    module = ptx(parameters, body, shared=shared).replace(".param .b8 param_", ".param .align 64 .b8 param_")
    program(module).launch((options.get("cluster", ONE)), (threads, 1, 1), list(args), **options)


def fails(message: str, parameters: str, body: str, *args: Any, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        run(parameters, body, *args, **options)


# Tensor maps. A thread loads a box; all of them write its bytes, as they lie in shared memory, to the output.

START = """
mov.u32 %r0, %tid.x; mov.u32 %r1, memory; mov.u32 %r2, 0; setp.ne.u32 %p0, %r0, 0;
@%p0 bra INITIALIZED;
mbarrier.init.shared::cta.b64 [%r1+{mbarrier}], 1;
fence.mbarrier_init.release.cluster;
INITIALIZED:
bar.sync 0;
"""
WAIT = "WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1+{mbarrier}], %r2; @!%p1 bra WAIT;"
MAP_ADDRESS = "mov.u64 %d9, param_map; cvta.param.u64 %d9, %d9;"
DUMP = """
COPY: setp.ge.u32 %p2, %r0, {size}; @%p2 bra END;
add.u32 %r3, %r1, %r0; ld.shared.b8 %r4, [%r3]; cvt.u64.u32 %d0, %r0; add.u64 %d0, out, %d0; st.global.b8 [%d0], %r4;
add.u32 %r0, %r0, 32; bra COPY;
END:
"""


def load_body(rank: int, size: int, corner: str = "") -> str:
    mbarrier = -(-size // 128) * 128
    coordinates = corner or ", ".join(f"c{k}" for k in range(rank))
    body = f"""
    {START}
    @%p0 bra LOADED;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1+{{mbarrier}}], {size};
    {MAP_ADDRESS}
    cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes
      [%r1], [%d9, {{{{{coordinates}}}}}], [%r1+{{mbarrier}}];
    LOADED:
    {WAIT}
    {DUMP}
    """
    return body.format(mbarrier=mbarrier, size=size)


def module(rank: int, body: str, shared: int) -> str:
    """`ptx` with a by-value tensor map and its coordinates before the output."""
    coordinates = " ".join(f"c{k}:s32" for k in range(rank))
    text = ptx(f"{coordinates} out:u64", body, shared=shared)
    return text.replace("kernel(", "kernel(.param .align 64 .b8 param_map[128], ", 1)


def load_box(
    tensor: torch.Tensor, box: tuple[int, ...], corner: tuple[int, ...], swizzle: Any, **options: Any
) -> torch.Tensor:
    """The bytes of shared memory after a copy of `box` at `corner`, both outermost first."""
    size = torch.Size(box).numel() * tensor.element_size()
    out = torch.zeros(size, dtype=torch.uint8)
    shared = -(-size // 128) * 128 + 8
    text = module(len(box), load_body(len(box), size), shared)
    arguments: list[Any] = [TensorMap(tensor, box, swizzle), *reversed(corner), out]
    program(text).launch(ONE, (32, 1, 1), arguments, **options)
    return out


LOAD = load_body(2, 1024)


def caught(message: str, launch: Callable[[Any], None]) -> bool:
    """Whether a launch fails with that message in one of two orders of threads."""
    errors = []
    for schedule in ("forward", "reverse"):
        try:
            launch(schedule)
        except EmulatorError as error:
            errors.append(str(error))
    return any(re.search(message, error) for error in errors)
