"""Kernels bound to a problem: tensor maps, grid, and the arguments of each launch."""
