"""FP8 attention: the cast of its operands, and both passes on Hopper."""
