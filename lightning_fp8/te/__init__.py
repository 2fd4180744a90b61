"""Transformer Engine: its checkpoints' keys, states and files, and its modules' arguments.

Transformer Engine does not have to be installed, and no code in its files is executed. ``export``, ``load`` and
``remap`` work with models. The other modules only work with values.
"""
