"""Transformer Engine's checkpoints into a model and back."""
