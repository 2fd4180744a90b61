"""Numba-CUDA kernels. They know bytes, threads and tiles; nothing of torch.nn, autograd or recipes.

``ptx`` holds the instructions, ``launch`` compiles, caches and starts kernels; every other module is a family of
kernels: pure functions from options to a :class:`~cuda_kernels.launch.Kernel`.
"""
