"""Compile kernels of attention for Hopper by another libnvvm and nvJitLink than the installed ones, in its own process.

    python -m tests.machine_code.older_compilers FOLDER

``FOLDER`` is a ``pip install --target`` of NVIDIA's wheels. The result is a line of JSON: the libraries that were used,
and the assembler's report of each kernel.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuda_kernels.kernel import Kernel

LIBRARIES = "libnvvm.so*", "libnvJitLink.so*"


def kernels() -> Iterator[Kernel]:
    """Attention's kernels for Hopper that have the fewest registers to spare."""
    from cuda_kernels.attention.backward.dkv import attention_dkv_256_kernel, attention_dkv_kernel
    from cuda_kernels.attention.backward.dq import attention_dq_kernel
    from cuda_kernels.attention.forward import attention_forward_kernel
    from cuda_kernels.attention.spec import AttentionSpec

    of_64, of_128, of_256 = (AttentionSpec(channels, "bfloat16") for channels in (64, 128, 256))
    yield attention_forward_kernel(of_128)
    yield attention_dq_kernel(of_128)
    yield attention_dkv_kernel(of_128)
    yield attention_dkv_kernel(of_64)
    yield attention_dkv_256_kernel(of_256, "dv")


def main(folder: str) -> None:
    """Load the libraries of ``folder`` before those that are installed, and compile."""
    for pattern in LIBRARIES:
        (library,) = Path(folder).rglob(pattern)
        ctypes.CDLL(str(library), os.RTLD_NOW | os.RTLD_GLOBAL)
    from cuda_kernels.lowering import compiler

    reports = {kernel.name: compiler.link(compiler.ltoir(kernel, "90a"), "90a", "cubin")[1] for kernel in kernels()}
    maps = Path("/proc/self/maps").read_text().splitlines()
    used = {line.split()[-1] for line in maps if "libnvvm" in line or "libnvJitLink" in line}
    print(json.dumps({"libraries": sorted(used), "reports": reports}))


if __name__ == "__main__":
    main(*sys.argv[1:])
