"""Transformer Engine: its checkpoints' keys, states and files, and its modules' arguments.

It need not be installed, and nothing that its files hold is run. ``export``, ``load`` and ``remap`` know models; the
other modules import nothing of ours but values.
"""
