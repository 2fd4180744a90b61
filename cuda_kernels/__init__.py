"""Numba-CUDA kernels. They know bytes, threads and tiles; nothing of torch.nn, autograd or recipes.

A kernel (:mod:`cuda_kernels.kernel`) is declared by a pure function from options, in ``casts``, ``norm`` and ``gemm``,
and written in the words of ``device``. ``lowering`` gives those words their meaning in Numba; ``host`` keeps machine
code, and chooses, loads and starts kernels.
"""
