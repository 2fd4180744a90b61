"""Numba-CUDA kernels. They work on bytes, threads and tiles, and do not depend on torch.nn, autograd or recipes.

A kernel (:mod:`cuda_kernels.kernel`) is declared by a pure function of options, in ``casts``, ``norm`` and ``gemm``,
and written with the types and instructions of ``device``. ``lowering`` implements these in Numba. ``host`` caches
machine code, and selects, loads and launches kernels.
"""
