"""Checkpoints of others: read as data, given to our modules, and written for them.

``unpickle``, ``torch_file`` and ``te_state`` read bytes and know no module.
"""
