"""Attention on GPUs without wgmma, Ada and Blackwell for workstations: warps run mma.sync on what cp.async copied."""
