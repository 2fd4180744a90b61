"""Norms and MLPs of Hugging Face models that cast their output for the FP8 layers after them."""
