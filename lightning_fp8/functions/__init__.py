"""The ``torch.autograd.Function`` of each FP8 operation: what a forward saves, and what its backward computes."""
