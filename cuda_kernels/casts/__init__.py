"""Kernels that cast to FP8, what is fused into them, and the update of delayed scales."""
