"""The ``torch.autograd.Function`` of each FP8 operation: what its forward saves and its backward computes."""
