"""Weights that are kept in FP8, and optimizers' float32 master weights for them."""
