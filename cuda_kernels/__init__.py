"""Numba-CUDA kernels. They know bytes, threads and tiles; nothing of torch.nn, autograd or recipes.

No kernel is here yet: on a CUDA device the ops run their plain-torch reference.
"""
