"""Host code: cache keys and files of machine code, compilers' versions, selection of GEMMs, launches."""
