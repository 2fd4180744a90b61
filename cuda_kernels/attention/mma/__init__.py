"""Attention on GPUs without wgmma (Ada, workstation Blackwell): operands copied by cp.async, multiplied by mma.sync."""
