"""``D = A Bᵀ`` of FP8 matrices. ``spec`` says what is computed; ``wgmma`` is Hopper's kernel, ``mma`` the others'."""
