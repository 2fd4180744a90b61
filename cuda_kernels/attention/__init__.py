"""Attention kernels: casts of the operands, and the forward and backward passes on Hopper (``mma``: on other GPUs)."""
