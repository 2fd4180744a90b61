"""``D = A Bᵀ`` of FP8 matrices. ``spec`` defines the problem; ``wgmma`` is for Hopper, ``mma`` for other GPUs."""
