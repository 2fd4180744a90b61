"""Kernels of LayerNorm and RMSNorm: statistics, normalization fused with the cast, and the gradients."""
