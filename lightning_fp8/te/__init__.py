"""Transformer Engine's FP8 state, read from its files without Transformer Engine and without running what they hold."""
