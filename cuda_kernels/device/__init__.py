"""Code that runs in kernels: types, instructions, and device functions shared by kernels. Pure Python."""
