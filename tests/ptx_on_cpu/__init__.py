"""Runs the PTX of a kernel, including inline PTX, on the CPU.

PTX is translated to C (`parse`, `writer`, `instructions`, `translate`), compiled with gcc (`build`) and run by a small
runtime (`runtime/`), in which each CUDA thread is a fiber. Runs are deterministic unless a seed is used. The runtime
checks what a GPU does not: bounds, alignment, read-only memory, deadlocks, divergence at collective instructions,
fences between the generic and the asynchronous proxy, registers of a wgmma in flight, the pool of setmaxnreg, and
races: on shared memory with vector clocks, on global memory between blocks.

A launch can be traced (`trace`): the synchronization of its threads, and copies to and reads of shared memory.

As on hardware, shared addresses have the rank of their block in bits 24 and up, also in the block itself.

Not modelled:

- races on global memory within a block;
- flags polled in shared memory, and a release that consists of a fence and a relaxed arrival;
- overwriting A's registers while a wgmma reads them;
- warps of a warpgroup that diverge at a wgmma, which synchronizes only the threads of each warp;
- concurrent blocks (clusters run one after another, so waiting for a later block is a deadlock);
- caches and time.

Kernels of Triton and CUTLASS that are correct on GPUs are correct here (`tests/foreign`). Apart from that the emulator
has not been compared with a GPU yet; ``accumulation="hopper"`` in particular is a guess.
"""

from tests.ptx_on_cpu.emulator import Program
from tests.ptx_on_cpu.errors import EmulatorError
from tests.ptx_on_cpu.tensor_map import TensorMap

__all__ = ["EmulatorError", "Program", "TensorMap"]
