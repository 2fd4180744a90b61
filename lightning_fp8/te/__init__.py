"""Transformer Engine: its checkpoints' keys, states and files, and its modules' arguments.

Transformer Engine does not have to be installed, and no code in its files is executed. These modules work with values;
``te_checkpoints`` works with models.
"""
