"""What surrounds kernels: keys and files of machine code, compilers' versions, the choice of a GEMM, launches."""
