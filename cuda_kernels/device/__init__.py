"""Code that runs inside kernels: types, instructions, and device functions that several kernels call. Pure Python."""
