"""``D = A Bᵀ`` of FP8 matrices. ``spec`` defines the problem; ``wgmma`` is the kernel of Hopper, ``mma`` of other GPUs."""
