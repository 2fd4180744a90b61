"""Checkpoints of Transformer Engine, remapped for a model, loaded into it and written from it."""
