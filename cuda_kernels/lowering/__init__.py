"""From kernel code to machine code: all that needs Numba and LLVM. Imported only when a kernel has to be compiled."""
