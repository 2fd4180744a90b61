"""Triton's source of the kernels: what a person writes for cards, compiled by Triton alone."""
