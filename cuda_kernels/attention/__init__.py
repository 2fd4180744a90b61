"""FP8 attention: the cast of its operands, and the forward pass on Hopper."""
