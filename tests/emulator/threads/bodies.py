"""PTX that threads of a block run together."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.emulator.samples import ptx
from tests.ptx_on_cpu import EmulatorError, Program

ONE, WARP = (1, 1, 1), (32, 1, 1)
ALL = "0xffffffff"
schedules = pytest.mark.parametrize("schedule", ["forward", "reverse", "random"])


@cache
def program(parameters: str, body: str, shared: int = 0) -> Program:
    return Program(ptx(parameters, body, shared=shared))


def per_thread(body: str, threads: int = 32, shared: int = 0, **options: Any) -> list[int]:
    """What each thread of a block has in %r0 at the end; %r1 is its number."""
    out = torch.zeros(threads, dtype=torch.int32)
    body = f"""
    mov.u32 %r1, %tid.x;
    {body}
    mul.wide.u32 %d60, %r1, 4; add.u64 %d60, out, %d60; st.global.b32 [%d60], %r0;
    """
    program("out:u64", body, shared).launch(ONE, (threads, 1, 1), [out], **options)
    return out.tolist()


def fails(message: str, body: str, threads: int = 32, shared: int = 0, **options: Any) -> None:
    with pytest.raises(EmulatorError, match=message):
        per_thread(body, threads, shared, **options)
