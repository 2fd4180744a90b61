"""Modules with Transformer Engine's names and arguments; those that torch.nn also has are its subclasses."""
