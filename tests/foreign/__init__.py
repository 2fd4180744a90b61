"""Kernels that another compiler made, known to be right on cards; where the emulator disagrees, it is wrong."""
