"""Runs the PTX of a kernel on the CPU, inline PTX included: what the GPU would execute, not its source.

PTX is translated to C (`parse`, `writer`, `instructions`, `translate`), compiled with gcc (`build`) and run by a small
runtime (`runtime/`), where each CUDA thread is a fiber. Nothing is random unless a seed says so. The runtime checks
what a GPU does not: bounds, alignment, read-only memory, deadlocks, divergence at collective instructions, fences
between the generic and the asynchronous proxy, and, with vector clocks, races on shared memory.

Not modelled: races on global memory, and flags polled in shared memory; blocks side by side (clusters run one after
another, so that waiting for a later block is a deadlock); reading a wgmma accumulator before its wait; caches, time,
and the lengths of loops: one that never ends, and never waits, never returns. No GPU has confirmed the emulator yet;
``accumulation="hopper"`` in particular is a guess.
"""

from tests.ptx_on_cpu.emulator import Program
from tests.ptx_on_cpu.errors import EmulatorError
from tests.ptx_on_cpu.tensor_map import TensorMap

__all__ = ["EmulatorError", "Program", "TensorMap"]
