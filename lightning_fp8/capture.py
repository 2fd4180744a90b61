"""Whether a CUDA graph is being captured: the host may then read nothing of the GPU, and must not cache results."""

import torch


def is_capturing() -> bool:
    """Whether the current stream is being captured. It does not initialize CUDA."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
