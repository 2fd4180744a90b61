"""Runs the PTX of a kernel on the CPU, inline PTX included: what the GPU would execute, not its source.

PTX is translated to C (`parse`, `writer`, `instructions`, `translate`), compiled with gcc (`build`) and run by a small
runtime (`runtime/`), where each CUDA thread is a fiber. Nothing is random unless a seed says so. The runtime checks
what a GPU does not: bounds, alignment, read-only memory, deadlocks, divergence at collective instructions, fences
between the generic and the asynchronous proxy, registers of a wgmma in flight, the pool of setmaxnreg, and races: on
shared memory with vector clocks, on global memory between blocks.

A launch can be traced (`trace`): what orders its threads, and what is copied to and read in shared memory.

As on hardware, shared addresses carry the rank of their block in bits 24 and up, the block's own, too.

Not modelled: races on global memory within a block; flags polled in shared memory, and a release that is a fence and a
relaxed arrival; overwriting A's registers under a wgmma; warps of a warpgroup apart at a wgmma, which joins only the
threads of each; blocks side by side (clusters run one after another, so that
waiting for a later block is a deadlock); caches and time. Kernels of Triton and CUTLASS, right on cards, are right here
(`tests/foreign`). No GPU has confirmed more of the emulator yet; ``accumulation="hopper"`` in particular is a guess.
"""

from tests.ptx_on_cpu.emulator import Program
from tests.ptx_on_cpu.errors import EmulatorError
from tests.ptx_on_cpu.tensor_map import TensorMap

__all__ = ["EmulatorError", "Program", "TensorMap"]
