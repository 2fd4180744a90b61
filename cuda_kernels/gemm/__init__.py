"""``D = A Bᵀ`` of FP8 matrices: which kernel for which problem (``config``), and the kernels."""
