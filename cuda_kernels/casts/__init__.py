"""Kernels that cast to FP8, operations fused into them, and the update of delayed scales."""
