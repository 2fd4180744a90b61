"""The barriers of pipelined kernels, over all interleavings of their threads.

The emulator records what each thread does with barriers and stages (:mod:`.record`), of small launches of each kernel
(:mod:`.kernels`). These programs (:mod:`.protocol`) are held against each other in every order (:mod:`.order`), with
faults planted (:mod:`.faults`), and against a plain search (:mod:`.search`).
"""
