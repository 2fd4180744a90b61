"""What runs inside kernels: words, instructions, and device functions that several kernels call. Pure Python."""
