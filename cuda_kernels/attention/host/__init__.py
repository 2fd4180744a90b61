"""Launches of the attention kernels: what torch and the driver need to start them."""
