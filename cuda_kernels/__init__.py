"""Numba-CUDA kernels. They know bytes, threads and tiles; nothing of torch.nn, recipes or lightning_fp8.

No kernel is here yet: on a CUDA device the ops run their plain-torch reference.
"""
