"""PTX that one thread or one warp runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.emulator.samples import ptx
from tests.ptx_on_cpu import EmulatorError, Program

ONE = (1, 1, 1)
WARP = (32, 1, 1)


def run(
    parameters: str, body: str, *args: Any, block: tuple[int, int, int] = ONE, shared: int = 0, **options: Any
) -> None:
    Program(ptx(parameters, body, shared=shared)).launch(ONE, block, list(args), **options)


def fails(message: str, parameters: str, body: str, *args: Any, **options: Any) -> str:
    with pytest.raises(EmulatorError, match=message) as error:
        run(parameters, body, *args, **options)
    return str(error.value)


def words(body: str, count: int, shared: int = 0, **options: Any) -> list[int]:
    """Registers %r0, %r1 ... of a thread after `body`."""
    out = torch.zeros(count, dtype=torch.int32)
    stores = " ".join(f"st.global.b32 [out+{4 * k}], %r{k};" for k in range(count))
    run("out:u64", f"{body} {stores}", out, shared=shared, **options)
    return out.tolist()
